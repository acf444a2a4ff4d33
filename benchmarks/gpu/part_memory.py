"""Peak memory of training steps, measured and predicted by ``nemorl plan``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _figures import parse, peak_bytes
from _models import SMOLLM2_1_7B, SMOLLM2_135M, TINY, Shape, drawn_batch, trainer, write_model
from nemorl.config import PolicyConfig
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import GIB, Moments, total
from nemorl_testing.batches import WeightedNLL

STEPS = 2
"""The first allocates the moments, the second is a step like all others."""


def row_tokens(budget: int) -> int:
    """Of each of the rows that fill a microbatch."""
    return min(512, budget // 2)


def predicted(shape: Shape, budget: int, *, recomputed: bool) -> Moments:
    """Memory of one rank in bfloat16, moment by moment, as ``nemorl plan`` has it."""
    policy = PolicyConfig(
        backend={"name": "dtensor"},  # type: ignore[arg-type]
        precision="bfloat16",
        activation_checkpointing=recomputed,
        max_sequence_tokens=row_tokens(budget),
    )
    held = HeldModel("policy", policy, shape.geometry, ranks=1, microbatch_tokens=budget, accumulates=False)
    return held.moments


def measured_bytes(folder: Path, shape: Shape, device: str, budget: int, *, recomputed: bool) -> int:
    """Of two steps with microbatches that fill the budget."""
    length = row_tokens(budget)
    batch = drawn_batch(shape, groups=budget // length, group_size=1, prompt=1, response=length)
    more: dict[str, Any] = {"microbatch_tokens": budget, "activation_checkpointing": recomputed}
    with peak_bytes(device) as peak:
        backend = trainer(folder, device, backend={"name": "dtensor", "layout": "padded"}, **more)
        for _ in range(STEPS):
            backend.train_step(batch, WeightedNLL())
        backend.shutdown()
        return peak()


def main() -> None:
    options = parse()
    sizes = {"tiny": TINY} if options.small else {"135M": SMOLLM2_135M, "1.7B": SMOLLM2_1_7B}
    cases = [(budget, again) for budget in ((64,) if options.small else (4096, 16384)) for again in (False, True)]
    for size, shape in sizes.items():
        with tempfile.TemporaryDirectory() as name, options.figures.case(size):
            folder = write_model(Path(name), shape, options.device)
            for budget, recomputed in cases:
                case = f"{size}, {budget} tokens" + (", recomputed" if recomputed else "")
                with options.figures.case(case):
                    plan = predicted(shape, budget, recomputed=recomputed)
                    foreseen = total(plan.peak)
                    measured = measured_bytes(folder, shape, options.device, budget, recomputed=recomputed)
                    figures = {"fullest": plan.worst, "predicted_gib": foreseen / GIB, "measured_gib": measured / GIB}
                    ratio = {"predicted_over_measured": foreseen / measured} if measured else {}
                    options.figures.add(case, {**figures, **ratio})


if __name__ == "__main__":
    main()
