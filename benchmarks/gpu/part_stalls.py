"""Where the host waits for the GPU, by line, and what a decoding step is made of.

PyTorch warns of every call that stops the stream (``set_sync_debug_mode``); its profiler counts kernels and the time
in which one of them ran.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _figures import parse, synchronize
from _models import SMOLLM2_135M, TINY, drawn_batch, generator, trainer, write_model
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_testing import simulated_device
from nemorl_testing.batches import WeightedNLL
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NEW_TOKENS = 32
SHOWN = 12
"""Lines with most waits that are named."""


def waits(work: Callable[[], Any], device: str) -> Counter[str]:
    """How often each line of Python waited for the device."""
    work()
    if device == simulated_device.DEVICE:
        with simulated_device.waits.counted() as lines:
            work()
        return lines
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    called = [w for w in caught if "synchronizing" in str(w.message)]
    return Counter(f"{Path(w.filename).parent.name}/{Path(w.filename).name}:{w.lineno}" for w in called)


def busy(work: Callable[[], Any]) -> dict[str, float]:
    """Kernels that ran, and their time beside the time on the clock."""
    work()
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        synchronize()
    events = [event for event in found.events() or () if event.device_type == DeviceType.CUDA]
    if not events:
        return {"kernels": 0, "gpu_ms": 0.0, "wall_ms": 0.0}
    wall_us = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    gpu_us = sum(e.time_range.elapsed_us() for e in events)
    return {"kernels": len(events), "gpu_ms": round(gpu_us / 1e3, 2), "wall_ms": round(wall_us / 1e3, 2)}


def main() -> None:
    options = parse()
    shape, rows = (TINY, 2) if options.small else (SMOLLM2_135M, 32)
    length = 32 if options.small else 512
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), shape, options.device)
        engine = generator(folder, options.device)
        asked = [GenerationRequest(tuple(range(9, 40)), sampling, (row,)) for row in range(rows)]
        backend = trainer(folder, options.device)
        batch = drawn_batch(shape, groups=rows // 2, group_size=2, prompt=8, response=length - 8)
        works: dict[str, Callable[[], Any]] = {
            f"{rows} responses of {NEW_TOKENS} tokens": lambda: engine.generate(asked),
            "a train step": lambda: backend.train_step(batch, WeightedNLL()),
            "log-probs": lambda: backend.get_logprobs(batch),
        }
        for what, work in works.items():
            with options.figures.case(what):
                lines = waits(work, options.device) if options.device != "cpu" else Counter[str]()
                options.figures.add(f"{what}: waits", sum(lines.values()))
                options.figures.add(f"{what}: lines", ", ".join(f"{k} {n}" for k, n in lines.most_common(SHOWN)))
                options.figures.add(what, busy(work))


if __name__ == "__main__":
    main()
