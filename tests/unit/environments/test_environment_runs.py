"""Whole runs with a tiny model: conversations, compositions and batched rewards on their way through the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
import pytest


def run(model: Path, folder: Path, **options: Any) -> list[dict[str, float]]:
    """The metrics of a run of one step, four prompts with four responses each."""
    nemorl.train(
        str(model),
        policy={"max_sequence_tokens": 200, "init": "random"},
        generation={"max_new_tokens": 4},
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 0, "export": False},
        cluster={"gpus_per_node": 0},
        num_prompts_per_step=4,
        num_generations_per_prompt=4,
        max_steps=1,
        run_dir=str(folder),
        **options,
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def logged(lines: list[dict[str, float]], name: str) -> float:
    """The last value of a metric."""
    (*_, value) = [line[key] for line in lines for key in line if key.endswith(name)]
    return value


def test_a_batched_reward_function_scores_a_step_in_one_call(tiny_model: Path, tmp_path: Path) -> None:
    sizes = []

    def brevity(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
        sizes.append((len(prompts), len(responses), len(answer)))
        return [-float(len(response)) for response in responses]

    run(tiny_model, tmp_path / "run", dataset="arithmetic", reward_fn=brevity)
    assert sizes == [(1, 1, 1), (16, 16, 16)]  # tried with the first row, then a step


def test_a_game_of_three_turns_trains(tiny_model: Path, tmp_path: Path) -> None:
    puzzles = {"name": "sliding_puzzle", "chat": False, "instruction": "Slide."}
    parts = {
        "game": {"environment": {"name": "sliding_puzzle", "illegal_penalty": 0.5}},
        "form": {"environment": {"name": "format", "pattern": ".*"}, "weight": 0.25},
    }
    lines = run(
        tiny_model,
        tmp_path / "run",
        dataset=puzzles,
        reward_fn={"name": "weighted", "parts": parts},
        max_turns=3,
    )
    # An untrained model makes no legal move: three times -0.5 for the game, 0.25 * 1 for the form.
    assert logged(lines, "avg_turns_per_sample") == 3
    assert logged(lines, "environment/game/illegal_moves") == 3
    assert logged(lines, "reward/form") == 3
    assert logged(lines, "train/reward") == pytest.approx(3 * (-0.5 + 0.25))
