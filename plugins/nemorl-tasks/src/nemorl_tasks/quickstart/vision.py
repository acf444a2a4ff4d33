"""The two runs of ``nemorl quickstart --vision``, as ordinary configs: a model that sees counts the shapes of drawings.

As in ``recipe``, whose names these are: a tiny model of Qwen2.5-VL's architecture imitates a teacher who is one too
high every second time (SFT), then learns from its own attempts (GRPO). Beside the held-out drawings it is asked the
same about blank images, before and after: what it gets right there it does not owe to its eyes. All in a minute of one
core.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemorl.types import Row
from nemorl_rl.data.rows import rows_of
from nemorl_rl.models.tiny_sight import write_tiny_sight

NAME = "quickstart-vision"
ACCURACY, CONTROL = "validation/drawings/accuracy", "validation/blank/accuracy"
CHANCE = 0.25
"""Right answers of who does not look: a drawing has one to four shapes, each as often."""

SLOPPY_OFFSETS = (0, 1)
"""How far off each of the teacher's two answers to a drawing is."""

MEDIA = {"train": ["connector", "tower"]}
"""The tower has random weights too: it has to learn."""


def write_model(path: Path) -> Path:
    """The untrained model, in a folder."""
    return write_tiny_sight(path)


def drawings(seed: int) -> dict[str, Any]:
    """Drawings of 28 by 28 pixels, four tokens each, and the question how many shapes are in them."""
    return {"name": "drawings", "task": "count", "num_train": 1024, "num_validation": 256, "seed": seed}


def sloppy_rows(rows: Sequence[Row]) -> list[Row]:
    """Each drawing twice, with the teacher's answers as ``response``."""
    return [{**row, "response": str(int(row["answer"]) + offset)} for row in rows for offset in SLOPPY_OFFSETS]


def taught_rows(seed: int) -> list[Row]:
    """What the warm-up imitates."""
    return sloppy_rows(rows_of(drawings(seed), "train") or [])


def sft_config(base: Path, run_dir: Path, seed: int) -> dict[str, Any]:
    """Warm-up: imitate the teacher."""
    return {
        "algorithm": "sft",
        "model": str(base),
        "run_dir": str(run_dir),
        "seed": seed,
        "data": drawings(seed),
        "batch_size": 32,
        "max_steps": 300,
        "max_epochs": 5,  # 64 steps are one
        "policy": {
            "init": "random",
            "media": MEDIA,
            "optimizer": {"lr": 2e-3},
            "schedule": {"kind": "linear", "warmup_steps": 20, "min_lr_frac": 0.1},
        },
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 100},
    }


def grpo_config(model: Path, run_dir: Path, seed: int) -> dict[str, Any]:
    """Reinforcement: eight attempts per drawing, rewarded when right."""
    return {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "seed": seed,
        "data": drawings(seed),
        "environment": "math",
        "num_prompts_per_step": 16,
        "num_generations_per_prompt": 8,
        "kl_penalty": 0.0,
        "max_steps": 150,
        "max_epochs": 3,  # 64 steps are one
        "policy": {
            "media": MEDIA,
            "optimizer": {"lr": 5e-4},
            "schedule": {"kind": "linear", "warmup_steps": 10, "min_lr_frac": 0.1},
        },
        "generation": {"max_new_tokens": 2},
        "validation": {
            "every": 50,
            "at_start": True,
            "temperature": 1.0,  # the teacher's two answers are as likely: which is the likelier one is chance
            "data": {"drawings": drawings(seed), "blank": {**drawings(seed), "blank": True}},
        },
        "checkpoint": {"every": 50, "metric": ACCURACY},
    }
