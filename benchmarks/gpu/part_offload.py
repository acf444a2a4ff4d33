"""Steps with parts of the model in the host's memory: the same log-probs, peak memory beside the plan's, seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from _figures import parse, peak_bytes, seconds
from _models import SMOLLM2_135M, TINY, Shape, drawn_batch, trainer, write_model
from nemorl.config import PolicyConfig
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import GIB, total
from nemorl_testing import simulated_device
from nemorl_testing.batches import WeightedNLL

KINDS: dict[str, dict[str, bool]] = {
    "nothing": {},
    "nothing, again": {},
    "optimizer": {"optimizer": True},
    "activations": {"activations": True},
    "parameters": {"parameters": True},
    "everything": {"parameters": True, "activations": True},
}
LOGPROBS_MAX = 0.1
"""Nats, in bfloat16 after two steps: kernels of CUDA add in any order, and the host's AdamW rounds otherwise."""
STEPS = 2
OPTIMIZER = {"lr": 1e-5, "eps": 1e-3}


def predicted_gib(shape: Shape, budget: int, row: int, offload: dict[str, bool]) -> float:
    """Peak of one rank, as ``nemorl plan`` has it."""
    backend: Any = {"name": "dtensor", "layout": "padded", "offload": offload}
    policy = PolicyConfig(backend=backend, precision="bfloat16", max_sequence_tokens=row)
    held = HeldModel("policy", policy, shape.geometry, ranks=1, microbatch_tokens=budget)
    return total(held.moments.peak) / GIB


def main() -> None:
    options = parse()
    shape, budget, rows = (TINY, 64, 4) if options.small else (SMOLLM2_135M, 8192, 32)
    length = budget // 2 if options.small else 512
    batch = drawn_batch(shape, groups=rows, group_size=1, prompt=1, response=length - 1)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), shape, options.device)
        wanted: torch.Tensor | None = None
        for kind, offload in KINDS.items():
            if "parameters" in offload and options.device == simulated_device.DEVICE:
                continue  # FSDP2 does not run there
            with options.figures.case(kind):
                settings: Any = {"backend": {"name": "dtensor", "layout": "padded", "offload": offload}}
                with peak_bytes(options.device) as peak:
                    backend = trainer(folder, options.device, microbatch_tokens=budget, optimizer=OPTIMIZER, **settings)
                    for _ in range(STEPS):
                        backend.train_step(batch, WeightedNLL())
                    measured = peak()
                found = backend.get_logprobs(batch)
                wanted = found if wanted is None else wanted
                options.figures.require(f"{kind}/logprobs_max", float((found - wanted).abs().max()), LOGPROBS_MAX)
                each = seconds(lambda: backend.train_step(batch, WeightedNLL()), warm_up=1, repeats=3)  # noqa: B023
                figures = {
                    "predicted_gib": predicted_gib(shape, budget, length, offload),
                    "measured_gib": measured / GIB,
                    "step_s": each,
                }
                options.figures.add(kind, figures)
                backend.shutdown()


if __name__ == "__main__":
    main()
