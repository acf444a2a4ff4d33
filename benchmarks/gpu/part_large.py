"""Training steps of an 8B model in bfloat16, whole and with LoRA: it fills a GPU, so activations are recomputed."""

from __future__ import annotations

from typing import Any

import torch
from _figures import parse
from _models import LLAMA_8B
from part_training import measure_settings

RECOMPUTED: dict[str, Any] = {
    "backend": {"name": "dtensor", "layout": "padded"},
    "activation_checkpointing": True,
    "microbatch_tokens": 8192,  # all of the batch: sums over several would be 28 GiB more
}
KINDS = {"LoRA, recomputed": {**RECOMPUTED, "lora": {"rank": 16}}, "recomputed": RECOMPUTED}
NEEDED_GIB = {"LoRA, recomputed": 40, "recomputed": 132}
"""Beside what a whole step takes by ``nemorl plan`` (127), the allocator's gaps."""


def main() -> None:
    options = parse()
    kinds = KINDS
    if options.is_cuda:
        held_gib = torch.cuda.get_device_properties(options.device).total_memory / 2**30
        kinds = {name: kind for name, kind in KINDS.items() if NEEDED_GIB[name] <= held_gib}
        for name in KINDS.keys() - kinds.keys():
            options.figures.add(f"8B, {name}", f"not run: {NEEDED_GIB[name]} GiB are needed")
    measure_settings(options, kinds, {"8B": LLAMA_8B})


if __name__ == "__main__":
    main()
