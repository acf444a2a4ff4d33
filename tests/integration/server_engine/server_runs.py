"""Weights that change, and short GRPO runs over servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nemorl.weights import WeightHandle, in_process_handle

STEPS = 4
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(4)]


def handle_of(model: Any, version: int) -> WeightHandle:
    return in_process_handle(lambda: iter([dict(model.named_parameters())]), version)


def changed(model: Any) -> Any:
    """The model with other weights, in place."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.1 if parameter.ndim > 1 else 0.05))
    return model


def tokens(groups: Any) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def digits(prompt: str, response: str) -> float:
    return sum(character.isdigit() for character in response) / max(1, len(response))


def run(
    folder: Path, model: Path, backend: dict[str, Any], reward: Callable[[str, str], float] = digits
) -> list[dict[str, float]]:
    """The metrics of each training step."""
    from nemorl_cli.console import Console
    from nemorl_grpo.config import GRPOConfig

    config = GRPOConfig(
        model=str(model),
        policy={"optimizer": {"lr": 3e-3}, "max_sequence_tokens": 64},
        generation={"backend": backend, "max_new_tokens": 12, "temperature": 0.9},
        num_prompts_per_step=4,
        num_generations_per_prompt=8,
        kl_penalty=0.0,
        max_steps=STEPS,
        validation={"every": 0},
        checkpoint={"every": 0, "export": False},
        run_dir=folder,
    )
    config.build().fit(dataset=ROWS, reward_fn=reward, console=Console(quiet=True))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/reward" in line]


def seen(lines: list[dict[str, float]]) -> list[tuple[float, ...]]:
    names = ("train/reward", "train/mean_gen_tokens_per_sample", "train/loss", "train/grad_norm")
    return [tuple(line[name] for name in names) for line in lines]
