"""Groups of responses to one prompt: layout ``shared``, which computes the prompt once, against ``padded``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _figures import parse, peak_bytes, seconds
from _models import SMOLLM2_135M, TINY, drawn_batch, trainer, write_model
from nemorl.errors import NemorlError
from nemorl_tensors import TokenBatch
from nemorl_testing.batches import WeightedNLL
from pydantic import ValidationError
from torch import Tensor

CASES = {
    "P128 R64 G8": {"groups": 16, "group_size": 8, "prompt": 128, "response": 64},
    "P512 R64 G16": {"groups": 8, "group_size": 16, "prompt": 512, "response": 64},
    "P2048 R256 G16": {"groups": 2, "group_size": 16, "prompt": 1792, "response": 256},
}
SMALL = {"P16 R8 G4": {"groups": 2, "group_size": 4, "prompt": 16, "response": 8}}
LAYOUTS = ("padded", "shared")
LOGPROBS_AT_MOST = 0.5
"""Nats between the layouts in bfloat16; matrix products of other sizes round differently."""


def measure(options: Any, folder: Path, case: str, layout: str, batch: TokenBatch) -> Tensor | None:
    """Steps and scoring in one layout; the log-probs, ``None`` where this version does not have it."""
    with peak_bytes(options.device) as peak:
        try:
            backend = trainer(folder, options.device, backend={"name": "dtensor", "layout": layout})
        except (NemorlError, ValidationError) as error:
            options.figures.add(f"{case}, {layout}", f"not available: {str(error).splitlines()[0]}")
            return None
        found: Tensor = backend.get_logprobs(batch)
        score_s = seconds(lambda: backend.get_logprobs(batch), warm_up=1, repeats=3)
        step_s = seconds(lambda: backend.train_step(batch, WeightedNLL()), warm_up=1, repeats=3)
        figures = {"step_s": step_s, "logprobs_s": score_s, "tokens_per_s": round(batch.num_tokens / step_s)}
        options.figures.add(f"{case}, {layout}", {**figures, "peak_gib": round(peak() / 2**30, 3)})
        backend.shutdown()
        return found


def main() -> None:
    options = parse()
    shape = TINY if options.small else SMOLLM2_135M
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), shape, options.device)
        for case, sizes in (SMALL if options.small else CASES).items():
            batch = drawn_batch(shape, **sizes)
            logprobs: dict[str, Tensor | None] = {}
            for layout in LAYOUTS:
                with options.figures.case(f"{case}, {layout}"):
                    logprobs[layout] = measure(options, folder, case, layout, batch)
            padded, shared = logprobs.get("padded"), logprobs.get("shared")
            if padded is not None and shared is not None:
                gap = float((shared - padded).abs().max())
                options.figures.require(f"{case}: largest difference of log-probs", gap, LOGPROBS_AT_MOST)


if __name__ == "__main__":
    main()
