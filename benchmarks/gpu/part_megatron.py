"""The backend ``megatron`` on one GPU: its log-probs beside the CPU's, its steps beside those of ``dtensor``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from _figures import parse
from _models import TINY, drawn_batch, trainer, write_model
from nemorl_testing.batches import WeightedNLL
from part_parity import LIMITS, SHAPE, distance, exported
from part_training import measure_settings

MEGATRON: dict[str, Any] = {"backend": {"name": "megatron"}}
KINDS: dict[str, dict[str, Any]] = {
    "dtensor, padded": {"backend": {"name": "dtensor", "layout": "padded"}},
    "megatron": MEGATRON,
    "megatron, recomputed": {**MEGATRON, "activation_checkpointing": True},
}


def compare(folder: Path, options: Any, precision: str) -> None:
    """A step of megatron on the GPU beside one of dtensor in float32 on the CPU."""
    limits, figures = LIMITS[precision], options.figures
    batch = drawn_batch(TINY if options.small else SHAPE, groups=3, group_size=2, prompt=24, response=40)
    cpu, gpu = trainer(folder, "cpu", "float32"), trainer(folder, options.device, precision, **MEGATRON)
    gap = (gpu.get_logprobs(batch) - cpu.get_logprobs(batch)).abs()[batch.mask]
    figures.require(f"{precision}/logprobs_max", float(gap.max()), limits["logprobs_max"])
    ours, theirs = (backend.train_step(batch, WeightedNLL()) for backend in (gpu, cpu))
    loss, norm = theirs["loss"].value, theirs["grad_norm"].value
    figures.require(f"{precision}/loss", abs(ours["loss"].value - loss), limits["loss"] * max(abs(loss), 0.1))
    figures.require(f"{precision}/grad_norm", abs(ours["grad_norm"].value - norm) / norm, limits["gradient"])
    figures.add(f"{precision}/weights_after_a_step", distance(exported(cpu), exported(gpu)))
    for backend in (cpu, gpu):
        backend.shutdown()


def main() -> None:
    options = parse()
    torch.set_num_threads(min(8, torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), TINY if options.small else SHAPE, "cpu", "float32")
        for precision in ("float32", "bfloat16"):
            with options.figures.case(precision):
                compare(folder, options, precision)
    measure_settings(options, KINDS)


if __name__ == "__main__":
    main()
