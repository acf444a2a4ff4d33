"""Short runs of GRPO that are compared with each other, wherever their workers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig
from safetensors.torch import load_file

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
ALONE: dict[str, Any] = {"gpus_per_node": 0}
"""A cluster of this process."""


def settings(model: Path, run_dir: Path, cluster: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Of a run of four steps that saves nothing before its end."""
    return {
        "model": str(model),
        "policy": {"init": "random", "optimizer": {"lr": 1e-3}, "max_sequence_tokens": 64},
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "generation": {"max_new_tokens": 8},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0},
        "max_steps": 4,
        "cluster": cluster,
        "run_dir": str(run_dir),
        **changes,
    }


def digits(prompt: str, response: str) -> float:
    return float(sum(character.isdigit() for character in response))


def length(prompt: str, response: str) -> float:
    return len(response) / 8


def train(
    model: Path,
    run_dir: Path,
    cluster: dict[str, Any],
    *callbacks: object,
    rows: Any = ROWS,
    reward: Any = digits,
    **changes: Any,
) -> TrainResult:
    trainer = GRPOConfig(**settings(model, run_dir, cluster, **changes)).build()
    result: TrainResult = trainer.fit(rows, reward, callbacks=callbacks, console=Console(quiet=True))
    return result


def losses(result: TrainResult) -> list[float]:
    """Of all steps."""
    return [record["train/loss"] for record in result.history if "train/loss" in record]


def weights(result: TrainResult) -> dict[str, bytes]:
    """Byte by byte, as the run has exported them."""
    found = load_file(result.run_dir / "model" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


def node_of(place: Any) -> str:
    """The node of a worker's place."""
    node: str = ray.util.placement_group_table(place.group)["bundles_to_node_id"][place.index]
    return node
