"""The eight failures of docs/why-no-reward.md, each made by a tiny config and found by the tool that the page names."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config.load import load_config
from nemorl.errors import NemorlError
from nemorl_cli.console import Console

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[3] / "docs" / "why-no-reward.md"
STEPS = 15
MIXED, KL = "train/baseline_reward/pct_mixed", "train/kl_penalty"
Reward = Callable[[str, str], float]


def digits(prompt: str, response: str) -> float:
    """The share of digits: a model with random weights learns it within these steps."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


@dataclass
class Made:
    """A run that went wrong, or well."""

    run_dir: Path
    error: str
    records: list[dict[str, Any]]

    def curve(self, name: str) -> list[float]:
        return [record[name] for record in self.records if name in record]

    @property
    def alerts(self) -> set[str]:
        events = read_jsonl(self.run_dir / "events.jsonl")
        return {str(event["rule"]) for event in events if event["event"] == "alert"}


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Callable[..., Made]:
    def run(reward: Reward = digits, name: str = "run", **changes: Any) -> Made:
        settings: dict[str, Any] = {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 5e-3}},
            "generation": {"max_new_tokens": 8},
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 8,
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0, "export": False},
            "max_steps": STEPS,
            "records": {"every": 1},
            "run_dir": str(tmp_path / name),
        }
        rows = [{"prompt": f"{a}+{b}="} for a in range(2, 10) for b in range(2, 10)]
        error = ""
        try:
            load_config(settings | changes).build().fit(rows, reward, console=Console(quiet=True))
        except NemorlError as raised:
            error = str(raised)
        return Made(tmp_path / name, error, list(read_jsonl(tmp_path / name / "metrics.jsonl")))

    return run


def policy(lr: float) -> dict[str, Any]:
    return {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": lr}}


def test_the_page_has_all_eight() -> None:
    text = PAGE.read_text()
    for number in range(1, 9):
        assert f"\n## {number}. " in text


def test_a_run_that_learns_shows_none_of_it(make: Callable[..., Made]) -> None:
    made = make()
    reward = made.curve("train/reward")
    assert reward[-1] > 5 * reward[0]
    assert min(made.curve(MIXED)) == 100.0
    assert made.alerts <= {"kl_high"}  # a model of random weights does leave them


def test_1_the_grader_reads_another_form(make: Callable[..., Made], nemorl: Command) -> None:
    made = make(lambda prompt, response: float("\\boxed" in response))
    assert set(made.curve("train/baseline_reward/pct_0")) == {100.0}
    assert "few_mixed_groups" in made.alerts
    shown = nemorl("view", "samples", made.run_dir, "--all-wrong", "--limit", 4, "--json").json
    assert [sample["reward"] for sample in shown] == [0.0] * 4


def test_2_answers_are_cut(make: Callable[..., Made], nemorl: Command) -> None:
    def two_digits(prompt: str, response: str) -> float:
        return float(sum(character.isdigit() for character in response) >= 2)

    made = make(two_digits, generation={"max_new_tokens": 1})
    assert min(made.curve("train/truncation_rate")) > 0.8
    assert set(made.curve("train/reward")) == {0.0}
    shown = nemorl("view", "samples", made.run_dir, "--truncated", "--limit", 4, "--json").json
    assert {sample["finish_reason"] for sample in shown} == {"length"}


def test_3_prompts_are_too_easy(make: Callable[..., Made]) -> None:
    made = make(lambda prompt, response: 1.0)
    assert set(made.curve("train/baseline_reward/pct_1")) == {100.0}
    assert "few_mixed_groups" in made.alerts


def test_4_responses_are_all_alike(make: Callable[..., Made], nemorl: Command) -> None:
    made = make(generation={"max_new_tokens": 8, "temperature": 0.01})
    assert {"entropy_gone", "few_mixed_groups"} <= made.alerts
    shown = nemorl("view", "samples", made.run_dir, "--step", STEPS, "--group", 0, "--json").json
    assert len({sample["response"] for sample in shown}) == 1


def test_5_the_learning_rate_is_too_high(make: Callable[..., Made]) -> None:
    made = make(policy=policy(0.1))  # at 0.3 it jumps from text to text, and how long it stays is rounding
    assert {"kl_high", "entropy_gone"} <= made.alerts
    assert made.curve("train/approx_entropy")[-1] < 0.01  # one text, whatever its reward


def test_6_the_learning_rate_is_too_low(make: Callable[..., Made], nemorl: Command) -> None:
    low, healthy = make(policy=policy(1e-8), name="low"), make(name="healthy")
    assert max(low.curve(KL)) < 1e-6 < healthy.curve(KL)[-1]
    found = nemorl("compare", low.run_dir, healthy.run_dir, "--json").json
    assert "policy.optimizer.lr" in json.dumps(found)


def test_7_the_leash_is_too_short(make: Callable[..., Made], nemorl: Command) -> None:
    held, healthy = make(kl_penalty=1000.0, name="held"), make(name="healthy")
    assert held.curve("train/reward")[-1] < 0.5 * healthy.curve("train/reward")[-1]
    assert max(map(abs, held.curve("train/loss"))) > 10 * max(map(abs, healthy.curve("train/loss")))
    found = nemorl("compare", held.run_dir, healthy.run_dir, "--json").json
    assert "kl_penalty" in json.dumps(found)


def test_8_the_environment_is_too_slow(make: Callable[..., Made]) -> None:
    def slow(prompt: str, response: str) -> float:
        time.sleep(0.3)
        return digits(prompt, response)

    made = make(slow, rollouts={"environment_timeout_s": 0.1})
    assert set(made.curve("train/environment/environment_timeout")) == {1.0}
    assert "rollouts.environment_timeout_s" in made.error
    assert len(made.records) == 2  # the third such step ends it
