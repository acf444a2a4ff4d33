"""The quickstart's two runs, as ordinary configs. Everything is named, nothing imported: any plugin could stand in.

A tiny model first learns from examples (SFT) until it is right now and then, and then from its own attempts (GRPO).
The sizes are chosen so that both fit into a few minutes of two CPU cores, with the headroom left to GRPO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_SIZE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}

PROBLEMS: dict[str, Any] = {"name": "arithmetic", "operations": ["+"], "max_digits": 2}
TRAIN_ROWS, VALIDATION_ROWS = 4500, 500


def problems(seed: int) -> dict[str, Any]:
    """Two-digit additions; none of the held-out ones is ever trained on."""
    return {**PROBLEMS, "num_train": TRAIN_ROWS, "num_validation": VALIDATION_ROWS, "seed": seed}


def sft_config(base: Path, run_dir: Path, seed: int, steps: int) -> dict[str, Any]:
    """Warm-up: imitate worked answers, stopped early."""
    return {
        "algorithm": "sft",
        "model": str(base),
        "run_dir": str(run_dir),
        "seed": seed,
        "data": problems(seed),
        "batch_size": 256,
        "max_steps": steps,
        "policy": {
            "init": "random",
            "optimizer": {"lr": 2e-3, "betas": [0.9, 0.98]},
            "schedule": {"kind": "cosine", "warmup_steps": 20, "min_lr_frac": 0.1},
        },
        "validation": {"every": 0, "at_end": True},
        "checkpoint": {"every": 0},
    }


def grpo_config(model: Path, run_dir: Path, seed: int, steps: int) -> dict[str, Any]:
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
        "max_steps": steps,
        "policy": {
            "optimizer": {"lr": 5e-4},
            "schedule": {"kind": "linear", "warmup_steps": 5, "min_lr_frac": 0.1},
        },
        "generation": {"max_new_tokens": 6},
        "validation": {"every": 20, "at_start": True, "max_samples": VALIDATION_ROWS},
        "checkpoint": {"every": 50},
    }
