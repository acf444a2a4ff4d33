"""Decoding by the backend ``hf`` at several batch sizes, against the time in which the bytes could be read."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _figures import Figures, parse, seconds
from _models import SMOLLM2_1_7B, SMOLLM2_135M, TINY, Shape, generator, write_model
from nemorl.types import GenerationRequest, SamplingParams
from part_training import ceilings

SIZES = {"135M": SMOLLM2_135M, "1.7B": SMOLLM2_1_7B}
ROWS = (1, 8, 32, 128, 256)
PROMPT, NEW_TOKENS = 128, 64


def bound_s(shape: Shape, rows: int, prompt: int, tokens: int, gb_s: float) -> float:
    """Seconds to read the weights once per step and each row's keys and values, in bfloat16: no decoder is faster."""
    cached = sum(2 * shape.geometry.cache_elements * rows * (prompt + step) for step in range(tokens))
    # A copy reads and writes; decoding reads only, which is no faster per byte.
    return (2 * shape.geometry.parameters() * tokens + cached) / (gb_s * 1e9)


def decode(figures: Figures, name: str, shape: Shape, engine: Any, rows: int, tokens: int, gb_s: float) -> None:
    prompts = [tuple(8 + (row + place) % 80 for place in range(PROMPT)) for row in range(rows)]
    made = [0]

    def ask(count: int) -> None:
        sampling = SamplingParams(max_new_tokens=count)
        found = engine.generate([GenerationRequest(ids, sampling, (row,)) for row, ids in enumerate(prompts)])
        made[0] = sum(len(completion.token_ids) for group in found for completion in group)

    first_s = seconds(lambda: ask(1), warm_up=1, repeats=2)
    all_s = seconds(lambda: ask(tokens), warm_up=1, repeats=2)
    step_s = (all_s - first_s) / (tokens - 1)
    floor_s = bound_s(shape, rows, PROMPT, tokens, gb_s) / tokens
    figures.add(
        name,
        {
            "ms_per_step": round(step_s * 1e3, 3),
            "tokens_per_s": round(rows / step_s),
            "with_prefill_tokens_per_s": round(made[0] / all_s),
            "prefill_s": round(first_s, 4),
            "of_bandwidth_bound": round(floor_s / step_s, 4),
        },
    )


def main() -> None:
    options = parse()
    gb_s = float(ceilings(options).get("copy_gb_s", 10.0))
    rows_of, tokens = ((1, 4), 8) if options.small else (ROWS, NEW_TOKENS)
    for size, shape in {"tiny": TINY}.items() if options.small else SIZES.items():
        with tempfile.TemporaryDirectory() as name, options.figures.case(size):
            engine = generator(write_model(Path(name), shape, options.device), options.device)
            for rows in rows_of:
                with options.figures.case(f"{size}, {rows} rows"):
                    decode(options.figures, f"{size}, {rows} rows", shape, engine, rows, tokens, gb_s)
            engine.shutdown()


if __name__ == "__main__":
    main()
