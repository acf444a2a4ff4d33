"""Prompt samplers: what is known of a prompt, and which prompts follow from it. Numbers are worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from nemorl.types import Prompt, Sample, Score
from nemorl_rl.curriculum.budget import Budget
from nemorl_rl.curriculum.pass_rate import PassRate
from nemorl_rl.curriculum.sampler import Draw, PosteriorSampler, weighted_keys
from nemorl_rl.curriculum.statistics import Outcome, PromptStatistics
from nemorl_rl.curriculum.thompson import Thompson
from nemorl_rl.curriculum.uniform import Uniform

BASE = Sample(Prompt(0, "1+1=", (5,)), (5, 6, 7), (False, True, True), (0.0, -1.0, -1.0), Score(0.0), "2", "stop")


def sample(reward: float, *, correct: bool | None = None, valid: bool = True) -> Sample:
    return replace(BASE, score=Score(reward, correct=correct, valid=valid))


def tried(
    outcomes: dict[int, tuple[int, int]], *, tokens: int = 10, step: int = 1, half_life: float = 20
) -> PromptStatistics:
    """Row -> (passes, attempts), each of so many tokens, all asked for one step."""
    statistics = PromptStatistics(half_life)
    for row, (passes, attempts) in outcomes.items():
        statistics.add(row, Outcome(attempts, passes, float(passes), attempts * tokens), step)
    return statistics


def draw_of(statistics: PromptStatistics, rows: Sequence[int], count: int = 1, seed: int = 0) -> Draw:
    return Draw(count, tuple(rows[:count]), rows, statistics, seed)


# What is known of a prompt


def test_an_outcome_sums_up_the_responses_that_could_be_scored() -> None:
    group = [sample(2.0, correct=True), sample(0.5), sample(7.0), sample(-1.0), sample(9.0, valid=False)]
    # Passes: right is 1, half a reward is 0.5, 7 and -1 are clamped to 1 and 0. Three tokens each.
    assert Outcome.of(group) == Outcome(attempts=4, passes=2.5, rewards=8.5, tokens=12)


def test_a_group_that_nobody_could_score_has_no_outcome() -> None:
    assert Outcome.of([sample(1.0, valid=False), sample(0.0, valid=False)]) is None


def test_evidence_halves_with_every_half_life() -> None:
    statistics = tried({3: (6, 8)}, step=5, half_life=10)
    assert statistics.evidence(3) == (6, 2)
    statistics.now = 15
    assert statistics.evidence(3) == (3, 1)
    # 2 passes of 8 at step 25: what was there is worth a quarter, 1.5 and 0.5.
    statistics.add(3, Outcome(8, 2, 2.0, 80), 25)
    assert statistics.evidence(3) == (3.5, 6.5)
    assert statistics.evidence(4) == (0, 0)


def test_a_record_keeps_all_attempts_beside_the_recent_ones() -> None:
    statistics = tried({3: (6, 8)}, step=5, half_life=10)
    statistics.add(3, Outcome(8, 2, 1.0, 160), 15)
    record = statistics.get(3)
    assert record is not None
    assert (record.visits, record.attempts, record.passes, record.rewards, record.tokens) == (2, 16, 8, 7.0, 240)
    assert (record.last_step, record.first_pass_rate) == (15, 0.75)
    assert record.pass_rate == (3 + 2) / (4 + 8)


def test_the_posterior_adds_the_prior() -> None:
    sampler = PosteriorSampler(prior_passes=2, prior_failures=1)
    assert sampler.posterior(tried({3: (6, 8)}), 3) == (8, 3)
    assert sampler.posterior(tried({}), 3) == (2, 1)


# pass_rate


def test_pass_rate_weighs_by_the_expected_variance_of_the_reward() -> None:
    statistics = tried({0: (4, 8), 1: (8, 8), 2: (0, 8)})
    sampler = PassRate(prior_passes=1, prior_failures=1)
    # a b / ((a + b) (a + b + 1)) of Beta(5, 5), Beta(9, 1), Beta(1, 9), and of the prior Beta(1, 1).
    expected = [25 / 110, 9 / 110, 9 / 110, 1 / 6]
    assert sampler.weights(draw_of(statistics, range(4))) == pytest.approx(expected, rel=1e-15)


def test_a_solved_prompt_comes_near_to_one_that_was_never_asked() -> None:
    statistics = tried({0: (8, 8)}, half_life=20)
    sampler = PassRate(prior_passes=1, prior_failures=1)
    statistics.now = 61  # three half-lives: one pass is left, Beta(2, 1): 2 / (3 * 4)
    assert sampler.weights(draw_of(statistics, range(2))) == pytest.approx([1 / 6, 1 / 6])
    statistics.now = 1001
    assert sampler.weights(draw_of(statistics, range(1))) == pytest.approx([1 / 6], abs=1e-6)


def test_weighted_keys_choose_in_proportion_to_the_weights() -> None:
    firsts: Counter[int] = Counter()
    for seed in range(4000):
        keys = weighted_keys([3.0, 1.0, 0.0], seed)
        firsts[keys.index(max(keys))] += 1
    # 3/4 of 4000 is 3000, the standard deviation sqrt(4000 * 3/16) = 27.
    assert firsts[2] == 0
    assert abs(firsts[0] - 3000) < 5 * 27


def test_pass_rate_prefers_prompts_that_half_of_the_responses_solve() -> None:
    statistics = tried({row: ((8, 16) if row < 10 else (16, 16)) for row in range(20)})
    counts = Counter(
        row < 10 for seed in range(300) for row in PassRate().choose(draw_of(statistics, range(20), 5, seed))
    )
    # Beta(9, 9) has 81 / (18 * 19) = 0.237, Beta(17, 1) 17 / (18 * 19) = 0.050: about five of six, a little less
    # without replacement.
    assert 0.72 < counts[True] / 1500 < 0.85


# thompson


def test_thompson_takes_the_prompts_whose_pass_rate_is_near_the_target() -> None:
    statistics = tried({row: (row * 100, 1000) for row in range(11)})
    assert sorted(Thompson(target=0.3).choose(draw_of(statistics, range(11), 1))) == [3]
    assert sorted(Thompson(target=0.75).choose(draw_of(statistics, range(11), 2))) == [7, 8]


def test_thompson_tries_prompts_that_were_never_asked_and_returns_to_solved_ones() -> None:
    statistics = tried({0: (8, 8)}, half_life=5)
    draws = [Thompson().choose(draw_of(statistics, range(2), 1, seed)) for seed in range(300)]
    # Beta(9, 1) has its mean at 0.9; where it is 0.4 from the target, four of five of a uniform one are nearer.
    assert draws.count([1]) > 210
    statistics.now = 101  # twenty half-lives: the two are the same
    draws = [Thompson().choose(draw_of(statistics, range(2), 1, seed)) for seed in range(300)]
    assert 110 < draws.count([1]) < 190  # 150, standard deviation 8.7


def test_thompson_is_a_function_of_state_and_seed() -> None:
    statistics = tried({row: (row % 3, 2) for row in range(30)})
    first = Thompson().choose(draw_of(statistics, range(40), 8, seed=5))
    assert first == Thompson().choose(draw_of(statistics, range(40), 8, seed=5))
    assert first != Thompson().choose(draw_of(statistics, range(40), 8, seed=6))


# budget


def test_budget_divides_by_the_tokens_that_an_attempt_is_expected_to_take() -> None:
    statistics = PromptStatistics(20)
    for row, tokens in enumerate((100, 300)):
        statistics.add(row, Outcome(4, 2, 2.0, 4 * tokens), 1)
    sampler = Budget(prior_passes=1, prior_failures=1, prior_attempts=4)
    # All attempts took 200 tokens on average, which counts as much as four of the prompt's own: 150 and 250.
    # E[p (1 - p)] of Beta(3, 3) is 9 / 42, of the prior 1 / 6; a prompt that was never asked is taken for average.
    expected = [9 / 42 / 150, 9 / 42 / 250, 1 / 6 / 200]
    assert sampler.weights(draw_of(statistics, range(3))) == pytest.approx(expected, rel=1e-15)
    dear = sampler.model_copy(update={"fixed_tokens": 50.0})
    assert dear.weights(draw_of(statistics, range(1))) == pytest.approx([9 / 42 / 200], rel=1e-15)


# What all have in common


@pytest.mark.parametrize("sampler", [PassRate(), Thompson(), Budget()])
@pytest.mark.parametrize("count", [1, 5, 6, 15])
def test_no_prompt_comes_twice_before_each_came_once(sampler: PosteriorSampler, count: int) -> None:
    counts = Counter(sampler.choose(draw_of(tried({0: (1, 2), 3: (2, 2)}), range(6), count)))
    assert counts.total() == count
    assert max(counts.values()) - min(counts[row] for row in range(6)) <= 1


def test_uniform_takes_the_order_of_the_epoch() -> None:
    assert Uniform().choose(Draw(3, (4, 0, 4), range(5), tried({}), 0)) == [4, 0, 4]
