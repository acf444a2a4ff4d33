"""Real runs of a tiny random model that keep everything, in this process: a second each."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from nemorl.config.load import load_config
from nemorl_cli.console import Console


def config_of(model: Path, **changes: Any) -> dict[str, Any]:
    """GRPO that rewards two digits, which a random model writes now and then; everything is kept."""
    config: dict[str, Any] = {
        "algorithm": "grpo",
        "model": str(model),
        "policy": {
            "init": "random",
            "max_sequence_tokens": 32,
            "optimizer": {"lr": 5e-3},
            "schedule": {"kind": "cosine"},
            "max_grad_norm": 0.3,
        },
        "data": {"name": "arithmetic", "num_train": 40, "num_validation": 4},
        "environment": {"name": "format", "pattern": r".*\d.*\d.*"},
        "generation": {"max_new_tokens": 8},
        "kl_penalty": 0.0,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 8,
        "max_steps": 3,
        "checkpoint": {"every": 1, "keep_last": 10, "export": False},
        "validation": {"every": 0, "at_end": False},
        "records": {"groups": 4, "trainer_logprobs": True},
    }
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    return config


def real_run(model: Path, folder: Path, **changes: Any) -> Path:
    """A run of three steps."""
    config = load_config({**config_of(model, **changes), "run_dir": str(folder)})
    config.build().fit(console=Console(quiet=True))
    return folder


def fingerprint(folder: Path) -> dict[str, str]:
    """The hash of every file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
