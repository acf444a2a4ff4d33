"""Training steps of published shapes in bfloat16: seconds, tokens/s and MFU, packed, padded and recomputed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from _figures import Figures, parse, peak_bytes, seconds
from _models import SMOLLM2_1_7B, SMOLLM2_135M, TINY, Shape, drawn_batch, trainer, write_model
from nemorl_rl.planning.device_peaks import device_peak
from nemorl_testing.batches import WeightedNLL

SIZES = {"135M": SMOLLM2_135M, "1.7B": SMOLLM2_1_7B}
SEQUENCES = {"135M": 64, "1.7B": 32, "8B": 8}
LENGTH = 1024


def ceilings(options: Any) -> dict[str, float]:
    """What the part ``machine`` measured, where it ran before."""
    file = options.json.with_name("machine.json")
    return json.loads(file.read_text())["figures"] if file.is_file() else {}


def measure(figures: Figures, name: str, shape: Shape, backend: Any, batch: Any, options: Any, repeats: int) -> None:
    """Some steps; the figures of their median."""
    lengths = batch.lengths.tolist()
    squares = sum(length * length for length in lengths)
    flops = shape.geometry.training_flops(sum(lengths), int(batch.mask.sum()), squares)
    step_s = seconds(lambda: backend.train_step(batch, WeightedNLL()), warm_up=2, repeats=repeats)
    speed = flops / step_s
    found = {"step_s": step_s, "tokens_per_s": round(sum(lengths) / step_s), "tflops": speed / 1e12}
    found["mfu"] = speed / device_peak(options.device, torch.bfloat16)
    if measured := ceilings(options).get("matmul_bfloat16_tflops"):
        found["of_measured_matmul"] = speed / 1e12 / measured
    figures.add(name, found)


def settings() -> dict[str, dict[str, Any]]:
    return {
        "padded": {"backend": {"name": "dtensor", "layout": "padded"}},
        "auto": {},
        "padded, recomputed": {
            "backend": {"name": "dtensor", "layout": "padded"},
            "activation_checkpointing": True,
        },
        "padded, LoRA": {"backend": {"name": "dtensor", "layout": "padded"}, "lora": {"rank": 16}},
    }


def measure_settings(
    options: Any, kinds: Mapping[str, dict[str, Any]], sizes: Mapping[str, Shape] = MappingProxyType(SIZES)
) -> None:
    """Steps of each size with each of these settings of a policy, by name."""
    length, repeats = (32, 1) if options.small else (LENGTH, 3)
    for size, shape in {"tiny": TINY}.items() if options.small else sizes.items():
        with tempfile.TemporaryDirectory() as name:
            folder = write_model(Path(name), shape, options.device)
            batch = drawn_batch(shape, groups=SEQUENCES.get(size, 4), group_size=1, prompt=1, response=length - 1)
            for kind, more in kinds.items():
                with options.figures.case(f"{size}, {kind}"), peak_bytes(options.device) as peak:
                    backend = trainer(folder, options.device, **more)
                    measure(options.figures, f"{size}, {kind}", shape, backend, batch, options, repeats)
                    options.figures.add(f"{size}, {kind}: peak GiB", round(peak() / 2**30, 3))
                    backend.shutdown()


def main() -> None:
    measure_settings(parse(), settings())


if __name__ == "__main__":
    main()
