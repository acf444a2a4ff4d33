"""The contracts of datasets and environments, and what these promise besides."""

from __future__ import annotations

from collections import Counter

import pytest
from nemorl.errors import DataError, UsageError
from nemorl.types import Prompt, Score
from nemorl_testing import conformance
from pydantic import ValidationError

from nemorl_gym_tasks.config import GymMixtureConfig, GymTasksConfig, TaskConfig
from nemorl_gym_tasks.problems import Origin

MIXTURE = {"chain_sum": {"weight": 3, "options": {"max_terms": 2, "max_digits": 1}}, "spell_backward": {}}
FIRST = Origin.of("chain_sum", {"max_terms": 2, "max_digits": 1}, 0, 0)
RIGHT = str(FIRST.entry["answer"])
TASK = {"text": FIRST.entry["question"], "answer": RIGHT, "row": {"gym_task": FIRST.as_column()}}

test_dataset = conformance("datasets", {"name": "gym_tasks", "tasks": MIXTURE, "num_train": 60, "num_validation": 10})
test_environment = conformance(
    "environments",
    "gym_tasks",
    examples=[(TASK, f"I think <answer>{RIGHT}</answer>", 1.0), (TASK, RIGHT, 1.0), (TASK, "no", 0.0)],
)


def test_tasks_come_in_proportion_to_their_weights() -> None:
    tasks = {"chain_sum": TaskConfig(weight=3), "spell_backward": TaskConfig()}
    rows = GymMixtureConfig(tasks=tasks, num_train=300, num_validation=0).build("train")
    assert rows is not None
    counts = Counter(row["gym_task"]["task"] for row in rows)
    # 225 of 300 are expected, with a standard deviation of sqrt(300 * 3/4 * 1/4) = 7.5
    assert 195 <= counts["chain_sum"] <= 255


def test_options_reach_the_task() -> None:
    tasks = {"chain_sum": TaskConfig(options={"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1})}
    rows = GymMixtureConfig(tasks=tasks, num_train=20, num_validation=0).build("train")
    assert rows is not None
    for row in rows:
        assert Origin(**row["gym_task"]).entry["metadata"]["num_terms"] == 4


def test_held_out_rows_do_not_depend_on_how_many_are_trained_on() -> None:
    few, many = (GymMixtureConfig(num_train=count, num_validation=5).build("validation") for count in (5, 50))
    assert few == many


def test_the_reward_is_logged_under_the_name_of_its_task() -> None:
    prompt = Prompt(0, TASK["text"], (1,), answer=RIGHT, row=TASK["row"])
    score = GymTasksConfig().build().score(prompt, RIGHT)
    assert isinstance(score, Score)
    assert score.metrics == {"scorer_error": 0.0, "chain_sum_reward": 1.0}


def test_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="Did you mean 'chain_sum'"):
        GymMixtureConfig(tasks={"chain_sums": TaskConfig()}).build("train")
    with pytest.raises(ValidationError, match="the mixture's to set"):
        TaskConfig(options={"seed": 3})
    with pytest.raises(DataError, match="no reasoning-gym task"):
        GymTasksConfig().build().score(Prompt(0, "1+1=", (1,)), "2")
    tiny = TaskConfig(options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    with pytest.raises(DataError, match="distinct problems in 40000 draws"):
        GymMixtureConfig(tasks={"chain_sum": tiny}, num_train=10_000, num_validation=0).build("train")
