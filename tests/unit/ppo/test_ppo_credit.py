"""Rewards per token, generalised advantage estimation, whitening and explained variance, by hand.

# N = tokens of all sequences concatenated, B = sequences, M = trained tokens
"""

from __future__ import annotations

import math

import pytest
import torch
from nemorl.types import Branch, Prompt, Sample, Samples, Score
from nemorl_ppo.credit import (
    advantages,
    discounted_sums,
    explained_variance,
    length_adaptive_lambdas,
    terminal_rewards,
    turn_rewards,
)
from nemorl_tensors import segment_ids, standardized
from torch import Tensor

NAN = float("nan")


def bools(letters: str) -> Tensor:
    """``PaEa``: True where the policy (a) spoke; P is a prompt token, E one of the environment."""
    return torch.tensor([letter == "a" for letter in letters])


def test_the_reward_is_paid_at_the_last_trained_token() -> None:
    #                 sequence 0: P a a, sequence 1: P a E a E (the environment had the last word), sequence 2: P P
    mask, lengths = bools("Paa" + "PaEaE" + "PP"), torch.tensor([3, 5, 2])
    rewards = terminal_rewards(torch.tensor([0.5, 2.0, 7.0]), mask, lengths)
    assert rewards.tolist() == [0, 0, 0.5, 0, 0, 0, 2.0, 0, 0, 0]  # nothing was said in sequence 2: nobody is paid


def test_turns_are_paid_where_they_end() -> None:
    # One episode in two sequences: P a a E a, whose turns earned 0.25 and 1, and P a, whose turn earned 2.
    # Then one of a turn that earned 3 without a token: nobody is paid for it.
    prompt, score = Prompt(0, "x", (1,)), Score(4.0)
    branch = Branch((1, 2), (False, True), (0.0, -1.0), ((1, 2.0),))
    mask = (False, True, True, False, True)
    ends = ((2, 0.25), (4, 1.0))
    split = Sample(prompt, (1, 2, 3, 4, 5), mask, (0.0,) * 5, score, "", "stop", 2, (0,), ends, (branch,))
    silent = Sample(prompt, (1, 2), (False, False), (0.0,) * 2, score, "", "stop", 1, (0,), ((1, 3.0),))
    paid = turn_rewards(Samples([split, silent]), bools("PaaEa" + "Pa" + "PE"))
    assert paid.tolist() == [0, 0, 0.25, 0, 1.0, 0, 2.0, 0, 0]


def test_gae_by_hand() -> None:
    # One sequence, gamma = 1/2, lambda = 1/2, so the decay is 1/4. Rewards 0, 0, 1; values 1, 2, 4; V ends at 0.
    #   delta = 0 + 2/2 - 1 = 0;  0 + 4/2 - 2 = 0;  1 + 0 - 4 = -3
    #   A_3 = -3;  A_2 = 0 + -3/4 = -0.75;  A_1 = 0 + -0.75/4 = -0.1875
    found = advantages(
        torch.tensor([NAN, 0.0, 0.0, 1.0]),
        torch.tensor([NAN, 1.0, 2.0, 4.0]),
        bools("Paaa"),
        torch.tensor([4]),
        gamma=0.5,
        lambdas_B=torch.tensor([0.5]),
    )
    assert found.tolist() == [0.0, -0.1875, -0.75, -3.0]


def test_a_token_of_the_environment_takes_no_time() -> None:
    # P a E E a with gamma = lambda = 1/2 is what P a a is: rewards 0, 1 and values 1, 2.
    #   delta = 0 + 2/2 - 1 = 0;  1 - 2 = -1.   A_2 = -1;  A_1 = 0 - 1/4
    lambdas = torch.tensor([0.5])
    found = advantages(
        torch.tensor([NAN, 0.0, NAN, NAN, 1.0]),
        torch.tensor([NAN, 1.0, NAN, 1e30, 2.0]),
        bools("PaEEa"),
        torch.tensor([5]),
        gamma=0.5,
        lambdas_B=lambdas,
    )
    assert found.tolist() == [0.0, -0.25, 0.0, 0.0, -1.0]


def test_lambda_one_is_the_return_less_the_value_and_lambda_zero_one_step_ahead() -> None:
    rewards, values = torch.tensor([0.0, 0.25, 0.0, 1.0]), torch.tensor([0.0, 0.5, 0.25, 0.75])
    mask, lengths = bools("Paaa"), torch.tensor([4])
    whole = advantages(rewards, values, mask, lengths, gamma=1.0, lambdas_B=torch.ones(1))
    assert whole.tolist() == [0.0, 1.25 - 0.5, 1.0 - 0.25, 1.0 - 0.75]
    short = advantages(rewards, values, mask, lengths, gamma=1.0, lambdas_B=torch.zeros(1))
    assert short.tolist() == [0.0, 0.25 + 0.25 - 0.5, 0.75 - 0.25, 1.0 - 0.75]


def backwards(terms: Tensor, decay_B: Tensor, sequences: Tensor) -> Tensor:
    """The definition: token by token, from the end."""
    sums = terms.clone()
    for t in range(len(terms) - 2, -1, -1):
        if sequences[t] == sequences[t + 1]:
            sums[t] += decay_B[sequences[t]] * sums[t + 1]
    return sums


@pytest.mark.parametrize("lengths", [[1], [2, 1, 1], [64, 63, 65, 1], [0, 5, 0, 0, 300, 7, 0]])
def test_the_scan_is_the_loop_over_time(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    sequences = segment_ids(torch.tensor(lengths))
    terms = torch.randn(len(sequences), generator=generator, dtype=torch.float64)
    decays_B = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    decays_B[0] = 1.0
    found = discounted_sums(terms, decays_B[sequences], sequences)
    torch.testing.assert_close(found, backwards(terms, decays_B, sequences), rtol=1e-12, atol=1e-12)


def test_each_sequence_has_its_own_lambda() -> None:
    # Two equal sequences: rewards 0, 1 and values 0, so deltas 0, 1. With gamma = 1 the first token gets lambda.
    found = advantages(
        torch.tensor([0.0, 0.0, 1.0] * 2),
        torch.zeros(6),
        bools("PaaPaa"),
        torch.tensor([3, 3]),
        gamma=1.0,
        lambdas_B=torch.tensor([0.25, 0.75]),
    )
    assert found.tolist() == [0.0, 0.25, 1.0, 0.0, 0.75, 1.0]


def test_longer_responses_get_a_larger_lambda() -> None:
    # alpha = 1/2: tokens 8 -> 1 - 1/4; 2 -> 1 - 1 = 0; 1 -> 1 - 2, so 0; none -> 0 too
    mask, lengths = bools("P" + "a" * 8 + "PEaa" + "Pa" + "PP"), torch.tensor([9, 4, 2, 2])
    assert length_adaptive_lambdas(mask, lengths, alpha=0.5).tolist() == [0.75, 0.0, 0.0, 0.0]


def test_whitening_is_over_the_trained_tokens_of_the_whole_batch() -> None:
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, unbiased variance 14/3.
    found = standardized(torch.tensor([NAN, 1.0, 2.0, math.inf, 3.0, 6.0]), bools("PaaPaa"), unbiased=True)
    std = math.sqrt(14 / 3)
    expected = [0.0, -2 / (std + 1e-6), -1 / (std + 1e-6), 0.0, 0.0, 3 / (std + 1e-6)]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("given", [[], [0.7], [0.1, 0.1, 0.1], [0.1, 0.1 + 1e-9]])
def test_advantages_without_a_spread_become_zero(given: list[float]) -> None:
    found = standardized(torch.tensor(given), torch.ones(len(given), dtype=torch.bool), unbiased=True)
    assert found.tolist() == pytest.approx([0.0] * len(given), abs=1e-7)


def test_explained_variance_by_hand() -> None:
    # returns 0, 2, 4: variance 8/3. Errors 0, 1, -1 have mean 0 and variance 2/3: 1 - (2/3) / (8/3) = 3/4.
    mask = bools("Paaa")
    returns = torch.tensor([NAN, 0.0, 2.0, 4.0])
    assert explained_variance(torch.tensor([NAN, 0.0, 1.0, 5.0]), returns, mask) == pytest.approx(0.75)
    assert explained_variance(returns + 3, returns, mask) == pytest.approx(1.0)  # a constant error is a bias
    assert explained_variance(torch.zeros(4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([0.0, 4.0, 2.0, 0.0]), returns, mask) == pytest.approx(-3.0)  # backwards


def test_nothing_to_explain_is_zero() -> None:
    assert explained_variance(torch.tensor([0.3]), torch.tensor([1.0]), bools("a")) == 0.0
    assert explained_variance(torch.zeros(2), torch.full((2,), 0.1), bools("aa")) == 0.0
    assert explained_variance(torch.zeros(2), torch.zeros(2), bools("PP")) == 0.0


def test_a_batch_without_trained_tokens_has_no_credit() -> None:
    mask, lengths = bools("PPP"), torch.tensor([1, 2])
    nothing = torch.full((3,), NAN)
    assert terminal_rewards(torch.ones(2), mask, lengths).tolist() == [0, 0, 0]
    found = advantages(nothing, nothing, mask, lengths, gamma=1.0, lambdas_B=torch.ones(2))
    assert found.tolist() == [0, 0, 0]
