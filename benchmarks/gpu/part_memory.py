"""Peak memory of training steps, measured and predicted by a closed form."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _figures import parse, peak_bytes
from _models import SMOLLM2_1_7B, SMOLLM2_135M, TINY, Shape, drawn_batch, trainer, write_model
from nemorl_testing.batches import WeightedNLL

CHUNK_BYTES = 128 * 2**20
"""float32 logits that exist at one time."""
STEPS = 2
"""The first allocates the moments, the second is a step like all others."""


def predicted_bytes(shape: Shape, tokens: int, *, recomputed: bool) -> int:
    """Of one rank in bfloat16.

    Per parameter: weights 2, masters 4, moments 8, gradient sums 4 bytes, gradients of one microbatch 2. Activations:
    10.8 h + 4 f elements per token and layer at 0.547 of float32's bytes (fitted on CPU), or the layers' inputs and one
    layer's where they are recomputed. Head: its gradient in float32 and three chunks of logits.
    """
    layer = 0.547 * 4 * (10.8 * shape.hidden_size + 4 * shape.intermediate_size) * tokens
    inputs = 2.0 * shape.hidden_size * tokens * shape.num_hidden_layers
    activations = inputs + layer if recomputed else layer * shape.num_hidden_layers
    logits = 3 * min(CHUNK_BYTES, 4 * shape.vocab_size * tokens)
    return round(20 * shape.geometry.parameters() + activations + logits + 4 * shape.vocab_size * shape.hidden_size)


def measured_bytes(folder: Path, shape: Shape, device: str, budget: int, *, recomputed: bool) -> int:
    """Of two steps with microbatches that fill the budget."""
    length = min(512, budget // 2)
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
                    predicted = predicted_bytes(shape, budget, recomputed=recomputed)
                    measured = measured_bytes(folder, shape, options.device, budget, recomputed=recomputed)
                    gib = {"predicted_gib": predicted / 2**30, "measured_gib": measured / 2**30}
                    ratio = {"predicted_over_measured": predicted / measured} if measured else {}
                    options.figures.add(case, {**gib, **ratio})


if __name__ == "__main__":
    main()
