"""The odds ratio loss by hand.

Two pairs, log-probs of the tokens of prompt | response:

    pair   chosen                  rejected               means
    1      . -0.4 | -0.5 -0.5      . -0.4 | -3.0          -0.5, -3.0
    2      . -0.6 | -2.0           . -0.6 | -0.25 -0.75   -2.0, -0.5

and a third one whose prompt filled the length limit: nothing of it is trained, and its slots hold NaN.
"""

from __future__ import annotations

import math

import pytest
import torch
from nemorl.metrics import values
from nemorl_preference.likelihood import with_likelihood
from nemorl_preference.orpo.loss import ORPOLoss, log_of_rest
from nemorl_tensors import TokenBatch, pair_batch

NAN = float("nan")
ONE, TWO, NONE = ([9, 9, 1], [False, False, True]), ([9, 9, 1, 1], [False, False, True, True]), ([9, 9], [False] * 2)
LOGPROBS = [NAN, -0.4, -0.5, -0.5, NAN, -0.4, -3.0, NAN, -0.6, -2.0, NAN, -0.6, -0.25, -0.75, NAN, NAN, NAN, NAN]
PAIRS = pair_batch([TWO, ONE, NONE], [ONE, TWO, NONE])


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


def cost(chosen: float, rejected: float) -> float:
    return math.log1p(math.exp(log_odds(rejected) - log_odds(chosen)))


PREFERENCE = (cost(-0.5, -3.0) + cost(-2.0, -0.5)) / 2
"""log odds: 0.432752 and -2.948931, -1.854587 and 0.432752; costs 0.033425 and 2.384046."""


def value(batch: TokenBatch, beta: float = 0.1) -> float:
    return float(ORPOLoss(beta)(torch.tensor(LOGPROBS), batch)[0])


def test_odds_are_those_of_the_mean_log_prob() -> None:
    assert pytest.approx(1.208735, abs=1e-6) == PREFERENCE


@pytest.mark.parametrize(
    ("aggregation", "of_prompts", "nll"),
    [
        ("token", False, 1.0),  # (0.5 + 0.5 + 2.0) / 3
        ("sequence", False, 1.25),  # (0.5 + 2.0) / 2
        ("token", True, 0.8),  # (0.4 + 0.5 + 0.5 + 0.6 + 2.0) / 5
    ],
)
def test_the_loss_is_the_likelihood_and_a_weighted_odds_ratio(aggregation: str, of_prompts: bool, nll: float) -> None:
    batch = with_likelihood(PAIRS, aggregation, of_prompts=of_prompts)  # type: ignore[arg-type]
    assert value(batch) == pytest.approx(nll + 0.1 * PREFERENCE, abs=1e-6)
    assert value(batch, beta=2.0) == pytest.approx(nll + 2.0 * PREFERENCE, abs=1e-6)


def test_metrics_are_means_over_the_pairs_that_count() -> None:
    _, metrics = ORPOLoss(0.1)(torch.tensor(LOGPROBS), with_likelihood(PAIRS, "token"))
    assert values(metrics) == pytest.approx({
        "accuracy": 0.5,
        "rewards_chosen_mean": -0.125,  # 0.1 * (-0.5 - 2.0) / 2
        "rewards_rejected_mean": -0.175,
        "rewards_margin_mean": 0.05,
        "num_valid_samples": 2,
        "preference_loss": PREFERENCE,
        "sft_loss": 1.0,
    }, abs=1e-6)  # fmt: skip


def test_parts_of_a_step_add_up() -> None:
    whole = with_likelihood(PAIRS, "token", of_prompts=True)
    cuts = ((0, 7, [0, 1]), (7, 18, [2, 3, 4, 5]))
    parts = [ORPOLoss(0.1)(torch.tensor(LOGPROBS[low:high]), whole.select(pair))[0] for low, high, pair in cuts]
    assert float(sum(parts)) == pytest.approx(value(whole))


def test_only_what_is_learnt_has_a_gradient() -> None:
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    ORPOLoss(0.1)(logprobs, with_likelihood(PAIRS, "token", of_prompts=True))[0].backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    signs = torch.sign(logprobs.grad).int().tolist()
    assert signs == [0, -1, -1, -1, 0, 0, 1, 0, -1, -1, 0, 0, 1, 1, 0, 0, 0, 0]


def test_a_response_that_is_certain_stays_finite() -> None:
    # 1 - exp(-1e-6) = 1e-6; a tenth of that is bounded by it. log(1 - 1e-20) = -1e-20 far at the other end.
    found = log_of_rest(torch.tensor([-1e-6, -1e-7, 0.0, -46.0, -math.log(2)])).tolist()
    assert found == pytest.approx([-13.815511, -13.815511, -13.815511, -1.05e-20, -0.693147], abs=1e-5)
