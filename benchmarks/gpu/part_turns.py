"""A trainer and an engine take turns in a GPU's memory: what each gives back, seconds, and that nothing changes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _figures import parse, peak_bytes, synchronize
from _models import SMOLLM2_1_7B, TINY, drawn_batch, generator, trainer, write_model
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_testing.batches import WeightedNLL

TURNS = 3
PARTS = ("weights", "gradients", "optimizer")
LEFT_MIB = 128
"""While both are away: cuBLAS keeps 32 MiB for each thread that has multiplied."""


class Clock:
    """Seconds and bytes of the device's memory after each stage of the turns."""

    def __init__(self, device: str) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self._device = device

    def time(self, stage: str, work: Callable[[], Any]) -> Any:
        """Do it; the figures of the last turn are kept."""
        synchronize()
        start_s = time.perf_counter()
        result = work()
        synchronize()
        self.stages[stage] = {"s": round(time.perf_counter() - start_s, 4), "held_gib": round(self.held() / 2**30, 3)}
        return result

    def held(self) -> int:
        """Bytes allocated on the device; 0 on the CPU."""
        return 0 if self._device == "cpu" else torch.get_device_module(self._device).memory_allocated(self._device)


def main() -> None:
    options = parse()
    shape, rows, length = (TINY, 4, 32) if options.small else (SMOLLM2_1_7B, 8, 1024)
    batch = drawn_batch(shape, groups=rows, group_size=1, prompt=1, response=length - 1)
    asked = [GenerationRequest(tuple(range(9, 40)), SamplingParams(max_new_tokens=16, temperature=0), (0,))]
    with tempfile.TemporaryDirectory() as name, options.figures.case("turns"), peak_bytes(options.device) as peak:
        folder, clock = write_model(Path(name), shape, options.device), Clock(options.device)
        before = clock.held()
        backend, engine = trainer(folder, options.device), generator(folder, options.device)
        backend.train_step(batch, WeightedNLL())
        logprobs, (first,) = backend.get_logprobs(batch), engine.generate(asked)
        tokens = [completion.token_ids for completion in first]
        for _ in range(TURNS):
            clock.time("the engine sleeps", lambda: engine.sleep(1))
            clock.time("the trainer leaves", lambda: backend.offload(PARTS))
            away = clock.held() - before
            clock.time("the engine wakes", lambda: engine.wake(["weights", "cache"]))
            (again,) = clock.time("16 tokens", lambda: engine.generate(asked))
            clock.time("the engine sleeps again", lambda: engine.sleep(1))
            clock.time("the trainer comes back", lambda: backend.onload(PARTS))
            found = backend.get_logprobs(batch)
            if [completion.token_ids for completion in again] != tokens:
                options.figures.fail("turns", "the engine samples otherwise after it slept")
        options.figures.add("peak GiB", round(peak() / 2**30, 3))
        for stage, figures in clock.stages.items():
            options.figures.add(stage, figures)
        options.figures.require(
            "log-probs after the turns, largest difference", float((found - logprobs).abs().max()), 0
        )
        options.figures.require("MiB left while both are away", away / 2**20, LEFT_MIB)
        engine.shutdown()
        backend.shutdown()


if __name__ == "__main__":
    main()
