"""A time-out as a bound: what an episode gets of whose reward only the most is known, and who may use it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.types import Branch, Outcome, Prompt, Sample, Samples, Score
from nemorl_rl.policy_gradient.advantages import over_valid
from nemorl_rl.rollouts.outcomes import OutcomeTable, expected_below
from recorded_messages import Raises

LATE: Outcome = "environment_timeout"
UPPER: dict[str, Any] = {"environment_timeout": "partial", "censored": "upper"}


def ended(reward: float, outcome: Outcome = "scored", *, valid: bool = True) -> Sample:
    score = Score(reward, {"tests": reward}, valid=valid, outcome=outcome)
    return Sample(Prompt(0, "?", (1,)), (1, 2), (False, True), (0.0, -1.0), score, "2", "stop")


def mean_of_kaplan_meier(rewards: list[float], bounds: list[float]) -> float:
    """By the product-limit formula, mirrored: from the highest value down, a reward r has the mass that is left times
    (its count) / (count of all at or below r); bounds take no mass with them but are no longer at risk below theirs."""
    left, mean = 1.0, 0.0
    for reward in sorted(set(rewards), reverse=True):
        at_risk = sum(r <= reward for r in rewards) + sum(b < reward for b in bounds)
        mass = left * rewards.count(reward) / at_risk
        left, mean = left - mass, mean + mass * reward
    return mean


@pytest.mark.parametrize(
    ("rewards", "bounds", "expected"),
    [
        ([0.0, 0.4, 1.0], [0.6], [0.2]),  # (0 + 0.4) / 2
        ([0.0, 0.4, 1.0], [0.4], [0.2]),  # a reward equal to the bound counts as below it
        ([0.0, 0.5, 1.0], [0.75, 0.25], [1 / 6, 0.0]),  # 0.25: 0 alone; 0.75: (0 + 0.5 + 0) / 3
        ([0.0, 1.0], [1.0, 1.0], [0.5, 0.5]),  # one bound tells nothing of another that is equal
        ([1.0], [0.5], [0.5]),  # nothing is known below: the bound
        ([], [0.5, 0.25], [0.25, 0.25]),  # 0.25: nothing below; 0.5: what 0.25 got
    ],
)
def test_a_bound_gets_what_is_to_be_expected_below_it(
    rewards: list[float], bounds: list[float], expected: list[float]
) -> None:
    assert expected_below(rewards, bounds) == pytest.approx(expected)


def test_the_mean_of_a_group_is_that_of_its_kaplan_meier_distribution() -> None:
    rewards, bounds = [0.0, 0.1, 0.3, 0.7, 0.7, 1.0], [0.9, 0.5, 0.2]
    # 0.2: 0.05. 0.5: (0 + 0.1 + 0.3 + 0.05) / 4 = 0.1125. 0.9: (0 + 0.1 + 0.3 + 0.7 + 0.7 + 0.05 + 0.1125) / 7.
    found = expected_below(rewards, bounds)
    assert found == pytest.approx([1.9625 / 7, 0.1125, 0.05])
    mean = (sum(rewards) + sum(found)) / 9
    assert mean == pytest.approx(mean_of_kaplan_meier(rewards, bounds))
    assert mean < (sum(rewards) + sum(bounds)) / 9


def test_a_group_is_settled_with_expected_rewards() -> None:
    group = [
        ended(0.0),
        ended(0.6, LATE),
        ended(0.4),
        ended(1.0),
        ended(0.9, "policy_timeout"),
        ended(9, LATE, valid=False),
    ]
    found = OutcomeTable(**UPPER).settled(group)
    assert [one.reward for one in found] == pytest.approx([0.0, 0.4 / 3, 0.4, 1.0, 0.0, 9])  # the stalled one got 0
    assert [one.score.valid for one in found] == [True] * 5 + [False]  # without a verdict there is no bound
    assert (found[1].score.metrics, found[1].score.components) == ({"reward_bound": 0.6}, {})
    assert [one.reward for one in OutcomeTable(environment_timeout="partial").settled(group)][1] == 0.6


def test_no_turn_of_an_episode_that_gets_what_is_expected_keeps_its_own() -> None:
    branch = Branch((1, 3), (False, True), (0.0, -1.0), turn_rewards=((1, 0.6),))
    late = replace(ended(0.6, LATE), turn_rewards=((1, 0.2),), branches=(branch,))
    _, found = OutcomeTable(**UPPER).settled([ended(0.4), late])
    assert (found.reward, [part.turn_rewards for part in found.sequences]) == (0.4, [(), ()])


def test_a_number_is_the_bound_of_all_time_outs() -> None:
    group = [ended(0.0), ended(0.4), ended(1.0), ended(0.0, LATE, valid=False)]
    found = OutcomeTable(environment_timeout=0.5, censored="upper").settled(group)
    assert [(one.reward, one.score.valid) for one in found][-1] == (0.2, True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Rewards 0, 0.4, 1 and 0.2 for the bound 0.6: sum 1.6.
        ({"algorithm": "rloo"}, [-1.6 / 3, 0.4 - 1.2 / 3, 1 - 0.6 / 3, 0.2 - 1.4 / 3]),
        ({"algorithm": "dr_grpo"}, [-0.4, 0.0, 0.6, -0.2]),
        ({"algorithm": "grpo", "normalize_std": False}, [-1.6 / 3, 0.0, 0.8, 0.2 - 1.4 / 3]),
    ],
)
def test_estimators_of_means_use_it(settings: dict[str, Any], expected: list[float]) -> None:
    config: Any = load_config({"model": "m", **settings, "rollouts": {"on_outcome": UPPER}})
    group = config.rollouts.on_outcome.settled([ended(0.0), ended(0.4), ended(1.0), ended(0.6, LATE)])
    assert over_valid(Samples(group), config.build().compute_advantages) == pytest.approx(expected)


@pytest.mark.parametrize(
    "algorithm",
    ["grpo", "dapo", "gdpo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "raw_reward", "ppo"],
)
def test_estimators_that_divide_refuse_it_by_name(algorithm: str, raises: Raises) -> None:
    with raises(ConfigError):
        load_config({"model": "m", "algorithm": algorithm, "rollouts": {"on_outcome": UPPER}})


@pytest.mark.parametrize("fate", ["drop", "refill", "lowest"])
def test_a_time_out_without_a_reward_is_no_bound(fate: str, raises: Raises) -> None:
    with raises(ConfigError):
        load_config(
            {"model": "m", "algorithm": "rloo", "rollouts": {"on_outcome": {**UPPER, "environment_timeout": fate}}}
        )
