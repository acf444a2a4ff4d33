"""The quickstart's two runs, as ordinary configs. Plugins are named, never imported: any other could stand in.

The tiny model first imitates a sloppy teacher, who is one too high three times out of five: it learns to add, and it
learns the mistake (SFT). Then it learns from its own attempts, rewarded only when an answer is right (GRPO), which no
amount of further imitation could teach it. Both fit into a few minutes of two CPU cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemorl.types import Row
from nemorl_rl.data.rows import rows_of
from nemorl_rl.models.tiny import write_tiny_model

NAME = "quickstart"
ACCURACY, CONTROL = "validation/accuracy", None

MODEL_SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

SLOPPY_OFFSETS = (0, 1, 0, 1, 1)
"""How far off each of the teacher's five answers to a problem is."""


def write_model(path: Path) -> Path:
    """The untrained model, in a folder."""
    return write_tiny_model(path, **MODEL_SIZE)


def problems(seed: int) -> dict[str, Any]:
    """Additions such as ``27+15=``; none of the held-out ones is ever trained on."""
    sizes = {"min_value": 10, "max_value": 49, "num_train": 700, "num_validation": 100}
    return {"name": "arithmetic", "operations": ["+"], **sizes, "seed": seed}


def sloppy_rows(rows: Sequence[Row]) -> list[Row]:
    """Each problem five times, with the teacher's answers as ``response``."""
    return [
        {"prompt": row["prompt"], "response": str(int(row["answer"]) + offset)}
        for row in rows
        for offset in SLOPPY_OFFSETS
    ]


def taught_rows(seed: int) -> list[Row]:
    """What the warm-up imitates."""
    return sloppy_rows(rows_of(problems(seed), "train") or [])


def sft_config(base: Path, run_dir: Path, seed: int) -> dict[str, Any]:
    """Warm-up: imitate the teacher."""
    return {
        "algorithm": "sft",
        "model": str(base),
        "run_dir": str(run_dir),
        "seed": seed,
        "data": problems(seed),
        "batch_size": 64,
        "max_steps": 1000,
        "policy": {
            "init": "random",
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
            "schedule": {"kind": "linear", "warmup_steps": 20, "min_lr_frac": 0.1},
        },
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 250},
    }


def grpo_config(model: Path, run_dir: Path, seed: int) -> dict[str, Any]:
    """Reinforcement: eight attempts per problem, rewarded when right."""
    return {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "seed": seed,
        "data": problems(seed),
        "environment": "math",
        "num_prompts_per_step": 64,
        "num_generations_per_prompt": 8,
        "kl_penalty": 0.001,
        "max_steps": 100,
        "policy": {
            "optimizer": {"lr": 3e-4},
            "schedule": {"kind": "linear", "warmup_steps": 10, "min_lr_frac": 0.1},
        },
        "generation": {"max_new_tokens": 6},
        "validation": {"every": 20, "at_start": True},
        "checkpoint": {"every": 50},
    }
