"""Algorithms that sample and learn without rewards: no environment is asked for, and one that is given is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import ConfigError, ConfigIssue
from nemorl.metrics import Metrics
from nemorl.types import Row
from nemorl_cli.console import Console
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.environments import Unscored
from nemorl_rl.environments.sources import as_environment
from nemorl_rl.rollouts.engine import RolloutPlan, rollout_metrics
from nemorl_rl.trainer import RolloutTrainer

ROWS = [{"prompt": "1+1="}, {"prompt": "2+2="}]


class ListenConfig(RolloutRunConfig):
    """Samples and learns nothing."""

    def reward_problems(self, scorer: object, fix: str) -> Iterator[ConfigIssue]:
        yield from ()


class StrictConfig(RolloutRunConfig):
    """The same, but what is sampled must be scored."""


class Listener(RolloutTrainer[Any]):
    config_class = ListenConfig
    batch_size = 2
    rollout_plan = property(lambda self: RolloutPlan(1, self.config.generation.sampling()))

    def open_inputs(self) -> None:
        self.environment = as_environment(self._scorer) or Unscored()

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        return rollout_metrics(self.collect(rows))


def settings(kind: type[RolloutRunConfig], model: Path, run_dir: Path) -> Any:
    return kind.model_validate(
        {
            "model": str(model),
            "run_dir": run_dir,
            "max_steps": 1,
            "policy": {"init": "random", "max_sequence_tokens": 32},
            "generation": {"max_new_tokens": 3},
            "cluster": {"gpus_per_node": 0},
        }
    )


@pytest.mark.parametrize(("reward_fn", "reward"), [(None, 0.0), (lambda p, r: 0.5, 0.5)])
def test_an_environment_is_optional(tiny_model: Path, tmp_path: Path, reward_fn: Any, reward: float) -> None:
    trainer = Listener(settings(ListenConfig, tiny_model, tmp_path / "run"))
    result = trainer.fit(ROWS, reward_fn, console=Console(quiet=True))
    assert result.metrics["train/reward"] == reward


def test_others_still_ask_for_one(tiny_model: Path, tmp_path: Path) -> None:
    strict = settings(StrictConfig, tiny_model, tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        Listener(strict).fit(ROWS)
    assert [problem.path for problem in caught.value.problems] == ["environment"]
    assert [problem.path for problem in strict.launch_problems()] == ["data", "environment"]
    listen = settings(ListenConfig, tiny_model, tmp_path / "run")
    assert [problem.path for problem in listen.launch_problems()] == ["data"]
