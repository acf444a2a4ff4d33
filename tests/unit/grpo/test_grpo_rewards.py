"""Rewards between the environment and the advantage, by hand; and what GRPO reports about groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from nemorl.metrics import values
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_grpo import GRPOConfig
from nemorl_rl.policy_gradient.advantages import group_advantages, has_spread
from nemorl_rl.policy_gradient.config import OverlongPenalty, RewardScaling
from nemorl_rl.policy_gradient.metrics import group_metrics
from nemorl_rl.policy_gradient.rewards import overlong, scale, shaped_rewards


def sample(reward: float, tokens: int = 2, *, cut: bool = False, index: int = 0) -> Sample:
    return Sample(
        prompt=Prompt(index, "?", (1,)),
        token_ids=(1, *[2] * tokens),
        response_mask=(False, *[True] * tokens),
        generation_logprobs=(0.0,) * (1 + tokens),
        score=Score(reward),
        response="",
        finish_reason="length" if cut else "stop",
    )


def config(**knobs: Any) -> GRPOConfig:
    return GRPOConfig(model="some/model", **knobs)


def test_scaling_clamps_then_maps_linearly() -> None:
    scaling = RewardScaling(source_min=-1, source_max=1, target_min=0, target_max=10)
    assert scale([-2, -1, 0, 0.5, 1, 7], scaling) == [0, 0, 5, 7.5, 10, 10]


def test_scaling_may_turn_rewards_around() -> None:
    assert scale([0, 0.25, 1], RewardScaling(target_min=1, target_max=-1)) == [1, 0.5, -1]


def test_the_default_scaling_only_clamps() -> None:
    assert scale([-1, 0.3, 2], RewardScaling()) == [0, 0.3, 1]


@pytest.mark.parametrize(("tokens", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (110, -3.0)])
def test_overlong_penalty_grows_over_the_buffer(tokens: int, penalty: float) -> None:
    # Buffer from 80 to 100, -2 at its end: -(tokens - 80) / 20 * 2.
    assert overlong(tokens, OverlongPenalty(max_response_tokens=100, buffer_tokens=20, penalty=2)) == pytest.approx(
        penalty
    )


def test_a_plain_config_leaves_rewards_alone() -> None:
    assert shaped_rewards(Samples([sample(0.3), sample(-2, cut=True)]), config()) == [0.3, -2]


def test_length_is_punished_after_scaling() -> None:
    # 4 of at most 4 tokens, a buffer of 2: scaled 10 -> 1, then -(4 - 2) / 2 = -1. 3 tokens: 0 -> 0, then -0.5.
    shaping = config(
        reward_scaling={"source_max": 10.0}, overlong_penalty={"max_response_tokens": 4, "buffer_tokens": 2}
    )
    assert shaped_rewards(Samples([sample(10, 4), sample(0, 3)]), shaping) == [0.0, -0.5]


def test_short_answers_earn_more_where_the_prompt_asks_for_little_effort() -> None:
    # 0.5 * (1 - 25 / 100) = 0.375 of the reward on top; 0.5 * (1 - 300 / 100) = -1, of which the penalty is 0.25; and
    # 4 * (1 - 25 / 100) = 3 counts as 1. A wrong answer has no bonus. Scaling comes after.
    def brief(reward: float, tokens: int, text: str = "Add. {brief}") -> Sample:
        return replace(sample(reward, tokens), prompt=Prompt(0, text, (1,)))

    effort = {"phrase": "{brief}", "weight": 0.5, "max_tokens": 100, "penalty": 0.25}
    samples = Samples([brief(2.0, 25), brief(2.0, 300), brief(0.0, 25), brief(2.0, 25, "Add.")])
    assert shaped_rewards(samples, config(low_effort=effort)) == [2.75, 1.75, 0.0, 2.0]
    assert shaped_rewards(samples, config(low_effort={**effort, "weight": 4}))[0] == 4.0
    doubled = {"source_max": 4.0, "target_max": 8.0}
    assert shaped_rewards(samples, config(low_effort=effort, reward_scaling=doubled))[0] == 5.5


def test_the_effort_of_a_conversation_is_its_last_answer() -> None:
    turns = replace(
        sample(1.0),
        prompt=Prompt(0, "brief", (1,)),
        token_ids=(1, 2, 2, 2, 3, 2, 3),
        response_mask=(False, True, True, True, False, True, False),
        generation_logprobs=(0.0,) * 7,
    )
    effort = {"phrase": "brief", "weight": 1, "max_tokens": 4}
    assert shaped_rewards(Samples([turns]), config(low_effort=effort)) == [1.75]  # one token of four


def test_only_cut_responses_lose_a_part_of_their_reward() -> None:
    samples = Samples([sample(1.0, cut=True), sample(1.0), sample(0.5, cut=True)])
    assert shaped_rewards(samples, config(truncation_reward_factor=0.25)) == [0.25, 1.0, 0.125]


def test_group_metrics_count_groups_that_teach_nothing() -> None:
    samples = Samples(
        [sample(reward, index=index) for index in range(4) for reward in [(0, 0), (1, 1), (0, 1), (2, 2)][index]]
    )
    assert values(group_metrics(samples, [0, 0, 0, 0, -1, 1, 0, 0])) == {
        "advantages/mean": 0.0,
        "advantages/max": 1.0,
        "advantages/min": -1.0,
        "baseline_reward/pct_0": 25.0,
        "baseline_reward/pct_1": 25.0,
        "baseline_reward/pct_mixed": 25.0,
    }


@pytest.mark.parametrize(("minibatches", "epochs", "updates"), [(1, 1, 1), (4, 1, 4), (2, 3, 6)])
def test_updates_per_step_are_minibatches_times_epochs(minibatches: int, epochs: int, updates: int) -> None:
    assert config(num_minibatches=minibatches, num_epochs_per_rollout=epochs).updates_per_step == updates


def test_a_reference_is_needed_for_a_kl_penalty_only() -> None:
    assert config(kl_penalty=0.1).needs_reference
    assert not config(kl_penalty=0.0).needs_reference


@pytest.mark.parametrize(
    ("rewards", "differs"),
    [
        ((0.1 + 0.2, 0.3), False),  # 0.30000000000000004
        ((sum([0.1] * 10), 1.0, 1.0), False),  # 0.9999999999999999
        ((1e6, 1e6 / 3.7 * 3.7), False),  # 999999.9999999999
        ((0.0, 1e-3), True),
        ((1e8, 1e8 + 1), True),
        ((0.0, 0.0), False),
        ((0.5,), False),
    ],
)
def test_rewards_differ_where_rounding_cannot_explain_it(rewards: tuple[float, ...], differs: bool) -> None:
    group = Samples([sample(reward) for reward in rewards])
    assert has_spread(group) == differs
    mixed = values(group_metrics(group, [0.0] * len(rewards))).get("baseline_reward/pct_mixed")
    assert mixed == (100.0 * differs if len(rewards) > 1 else None)  # one response is no group that could be mixed
    if not differs:
        credit = group_advantages(rewards, [0] * len(rewards))
        assert credit == pytest.approx([0.0] * len(rewards), abs=1e-9)


def test_right_up_to_rounding_is_right() -> None:
    group = Samples([sample(sum([0.1] * 10)), sample(1.0)])
    found = values(group_metrics(group, [0.0, 0.0]))
    assert (found["baseline_reward/pct_1"], found["baseline_reward/pct_0"]) == (100.0, 0.0)
