"""Credit turn by turn, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.types import Branch, Prompt, Sample, Samples, Score
from nemorl_grpo import DAPOConfig, GMPOConfig, GRPOConfig
from nemorl_rl.policy_gradient.config import OverlongPenalty
from nemorl_rl.policy_gradient.turn_credit import returns_to_go, turn_places
from nemorl_rl.serving.requests import PlacedSample, TurnPlace
from nemorl_tensors import TokenBatch
from pydantic import ValidationError

NAN = float("nan")


def episode(*earned: float, reward: float | None = None, index: int = 0, **facts: Any) -> Sample:
    """P a E a E a …: a prompt of one token, answers of one, each paid, and a word of the environment between."""
    mask = (False, *[place % 2 == 0 for place in range(2 * len(earned) - 1)])
    paid = tuple((2 * turn + 1, value) for turn, value in enumerate(earned))
    score = Score(sum(earned) if reward is None else reward, **facts)
    ids = tuple(range(len(mask)))
    return Sample(Prompt(index, "p", (0,)), ids, mask, (0.0,) * len(mask), score, "", "stop", turn_rewards=paid)


def credited(samples: list[Sample], **options: Any) -> list[list[float]]:
    """Advantages of what the policy chose, episode by episode; all other slots are NaN before."""
    config = GRPOConfig(model="m", credit="turn", normalize_std=False, leave_one_out=False, **options)
    (transform,) = config.turn_credit(config.advantage_clip_low, config.advantage_clip_high, config.rollouts.min_group)
    every = Samples(samples)
    batch = TokenBatch.from_samples(every, [NAN] * len(every))
    batch, _ = transform(batch, every)
    found = []
    for number in range(len(samples)):
        own = batch.mask & (batch.episodes[batch.sequence_ids] == number)
        found.append(batch["advantages"][own].tolist())
    assert not bool(batch["advantages"].isnan().any())
    return found


def test_a_turn_is_credited_with_what_is_earned_from_there_on() -> None:
    # Returns to go: (1 + 0, 0) and (0 + 1, 1). Turn 1: both 1, mean 1. Turn 2: 0 and 1, mean 1/2.
    assert credited([episode(1.0, 0.0), episode(0.0, 1.0)]) == [[0.0, -0.5], [0.0, 0.5]]


def test_whole_episodes_do_not_see_the_difference() -> None:
    config = GRPOConfig(model="m", normalize_std=False)
    assert config.advantages(Samples([episode(1.0, 0.0), episode(0.0, 1.0)])) == [0.0, 0.0]


def test_what_the_turns_do_not_account_for_is_paid_at_the_last() -> None:
    # 0.5 is left of 1.5: returns (1 + 0.5, 0.5) and (0, 0). Means 0.75 and 0.25.
    assert credited([episode(1.0, 0.0, reward=1.5), episode(0.0, 0.0)]) == [[0.75, 0.25], [-0.75, -0.25]]


def test_what_an_answer_that_is_context_earned_is_left_for_the_last() -> None:
    # P a E c: c was sampled within a schema and was paid 0.5, of 1.5 in all. It has no place, as it is not trained.
    mask, places = (False, True, False, False), (TurnPlace(0, 1, 2),)
    sample = PlacedSample(Prompt(0, "p", (0,)), (0, 1, 2, 3), mask, (0.0,) * 4, Score(1.5), "", "stop",
                          turn_rewards=((1, 1.0), (3, 0.5)), turn_places=places)  # fmt: skip
    assert returns_to_go(sample, 1.5, discount=1.0) == [1.5]


def test_rewards_of_whole_episodes_with_as_many_turns_are_grpo() -> None:
    rewards = (1.0, 0.0, 0.25)
    samples = [replace(episode(0.0, 0.0, reward=reward), turn_rewards=()) for reward in rewards]
    whole = GRPOConfig(model="m", normalize_std=False, leave_one_out=False).advantages(Samples(samples))
    assert credited(samples) == [[pytest.approx(value)] * 2 for value in whole]


def test_a_discount_fades_a_reward_once_per_turn() -> None:
    # AReaL: from the last turn back, reward[i] += discount * reward[i + 1].
    assert returns_to_go(episode(0.0, 0.0, 1.0), 1.0, 0.5) == [0.25, 0.5, 1.0]
    # 1 of 4 is left: 2 + 1, then 0 + 1.5, then 1 + 0.75.
    assert returns_to_go(episode(1.0, 0.0, 2.0), 4.0, 0.5) == [1.75, 1.5, 3.0]
    # Against an episode of zeros the halves of these remain.
    assert credited([episode(0.0, 0.0, 1.0), episode(0.0, 0.0, 0.0)], turn_discount=0.5) == [
        [0.125, 0.25, 0.5], [-0.125, -0.25, -0.5]
    ]  # fmt: skip


def test_a_turn_is_compared_with_the_same_turn_of_those_that_got_there() -> None:
    # Turn 1: returns 1, 1, 0: mean 2/3. Turn 2: 1 and 0, mean 1/2. Turn 3: one alone, nothing to compare.
    found = credited([episode(1.0), episode(0.0, 1.0), episode(0.0, 0.0, 0.0)])
    expected = [[1 / 3], [1 / 3, 0.5], [-2 / 3, -0.5, 0.0]]
    assert found == [pytest.approx(one, abs=1e-6) for one in expected]


def test_mean_and_spread_are_those_that_the_options_say() -> None:
    config = GRPOConfig(model="m", credit="turn")
    (transform,) = config.turn_credit(None, None, 1)
    samples = Samples([episode(1.0), episode(0.0), episode(0.5)])
    batch, _ = transform(TokenBatch.from_samples(samples, [NAN] * 3), samples)
    # Without itself: 1 against (0, 0.5): 0.75 / 0.353553; 0 against (1, 0.5): -0.75 / 0.353553; 0.5 against (1, 0): 0.
    assert batch["advantages"][batch.mask].tolist() == pytest.approx([2.12131, -2.12131, 0.0], abs=1e-4)


def test_an_episode_without_a_verdict_is_in_no_baseline_and_learns_nothing() -> None:
    found = credited([episode(1.0, 0.0), episode(9.0, 9.0, valid=False), episode(0.0, 0.0)])
    assert found == [[0.5, 0.0], [0.0, 0.0], [-0.5, 0.0]]


def test_a_group_with_too_few_verdicts_teaches_nothing() -> None:
    samples = [episode(1.0), episode(0.0), episode(0.0, valid=False)]
    assert credited(samples, rollouts={"min_group": 3}) == [[0.0], [0.0], [0.0]]


def test_prompts_are_not_compared() -> None:
    assert credited([episode(1.0), episode(5.0, index=1), episode(0.0), episode(3.0, index=1)]) == [
        [0.5], [1.0], [-0.5], [-1.0]
    ]  # fmt: skip


def test_advantages_are_clipped() -> None:
    assert credited([episode(4.0), episode(0.0)], advantage_clip_low=-0.5, advantage_clip_high=1.0) == [[1.0], [-0.5]]


def test_a_penalty_for_length_is_paid_at_the_end() -> None:
    # Of three tokens: the penalty begins at 2 and is 1 at 3. Returns 1 - 1 and 0 - 1, against 0 and 0.
    penalty = OverlongPenalty(max_response_tokens=3, buffer_tokens=1)
    found = credited([episode(1.0, 0.0, 0.0), episode(0.0, 0.0, 0.0)], overlong_penalty=penalty)
    assert found == [[0.5, 0.0, 0.0], [-0.5, 0.0, 0.0]]


def test_turns_of_a_fork_are_taken_in_the_order_in_which_they_were_asked_for() -> None:
    # The chain's turns are 1 and 3, the sub-agent's is 2, which is paid. The last one gets what is left.
    chain, fork = (False, True, False, True), Branch((0, 9), (False, True), (0.0, 0.0), ((1, 0.5),))
    places = (TurnPlace(0, 1, 2), TurnPlace(1, 1, 2), TurnPlace(0, 3, 4))
    sample = PlacedSample(
        Prompt(0, "p", (0,)), (0, 1, 2, 3), chain, (0.0,) * 4, Score(2.0), "", "stop", branches=(fork,),
        turn_places=places,
    )  # fmt: skip
    assert returns_to_go(sample, 2.0, 1.0) == [2.0, 2.0, 1.5]
    other = replace(sample, score=Score(0.0), branches=(replace(fork, turn_rewards=()),))
    # Tokens lie chain first: turns 1, 3, 2.
    assert credited([sample, other]) == [[1.0, 0.75, 1.0], [-1.0, -0.75, -1.0]]


def test_a_sample_that_does_not_say_has_a_turn_for_each_run_of_tokens_and_each_payment() -> None:
    mask = (False, True, True, True, False, True)
    sample = Sample(
        Prompt(0, "p", (0,)), tuple(range(6)), mask, (0.0,) * 6, Score(0.0), "", "stop", turn_rewards=((2, 1.0),)
    )  # fmt: skip
    assert turn_places(sample) == [TurnPlace(0, 1, 3), TurnPlace(0, 3, 4), TurnPlace(0, 5, 6)]


def test_a_discount_needs_turns() -> None:
    with pytest.raises(ValidationError, match="turn_discount"):
        GRPOConfig(model="m", turn_discount=0.9)
    assert DAPOConfig(model="m", credit="turn", turn_discount=0.9).turn_credit(None, None, 1)
    assert GRPOConfig(model="m").turn_credit(None, None, 1) == []
    with pytest.raises(ValidationError, match="credit"):
        GMPOConfig(model="m", credit="turn")


def test_the_gradient_of_a_turn_is_that_of_its_own_tokens() -> None:
    """The trainer's transform is applied before its update: what a turn earned moves its tokens and earlier ones."""
    trainer = GRPOConfig(model="m", credit="turn", normalize_std=False, kl_penalty=0.0).build()
    assert [type(one).__name__ for one in trainer.token_credit()] == ["TurnCredit"]
    samples = Samples([episode(0.0, 1.0), episode(0.0, 0.0)])
    batch = TokenBatch.from_samples(samples, [0.0, 0.0])
    batch, _ = trainer.token_credit()[0](batch, samples)
    logprobs = torch.zeros(batch.num_tokens, requires_grad=True)
    loss, _ = trainer.build_loss()(logprobs, batch)
    (-loss).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    # Both turns of the first rise by 1 / 4 of the tokens each, those of the second fall.
    assert logprobs.grad[batch.mask].tolist() == [0.25, 0.25, -0.25, -0.25]
