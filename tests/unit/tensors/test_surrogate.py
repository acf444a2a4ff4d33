"""The clipped surrogate and what goes with it, by hand.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import math

import pytest
import torch
from nemorl.metrics import values
from nemorl_tensors import KLTerm, KLType
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from nemorl_tensors.surrogate import clipped_surrogate, ratio_metrics, sampler_metrics

NAN = float("nan")


def test_masked_slots_have_ratio_one_and_no_gradient() -> None:
    policy = torch.tensor([NAN, -0.5, -math.inf], requires_grad=True)
    mask = torch.tensor([False, True, False])
    ratio = probability_ratio(masked_log_ratio(policy, torch.tensor([-1.0, -1.0, NAN]), mask))
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx([1.0, math.exp(0.5), 1.0])
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, math.exp(0.5), 0.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.5, 2.0, 2.4, 0.0),  # min(1.5 * 2, 1.2 * 2): enough of a good thing
        (1.5, -2.0, -3.0, -2.0),  # min(-3, -2.4): a bad token grew, push back in full
        (0.5, 2.0, 1.0, 2.0),  # min(1, 1.8): a good token shrank
        (0.5, -2.0, -1.8, 0.0),  # min(-1, -0.9 * 2): enough
        (1.1, 3.0, 3.3, 3.0),  # within [0.9, 1.2]
    ],
)
def test_a_ratio_gains_nothing_beyond_its_bound(ratio: float, advantage: float, expected: float, slope: float) -> None:
    given = torch.tensor([ratio], requires_grad=True)
    surrogate, clipped = clipped_surrogate(given, torch.tensor([advantage]), clip_low=0.1, clip_high=0.2)
    surrogate.sum().backward()
    assert given.grad is not None
    assert surrogate.item() == pytest.approx(expected)
    assert given.grad.item() == pytest.approx(slope)
    assert clipped.item() == pytest.approx(min(max(ratio, 0.9), 1.2))


def test_dual_clip_bounds_negative_advantages_only() -> None:
    # ratio 5: A = -1 gives -5 without, max(-5, 3 * -1) = -3 with; A = 1 is bounded by the ratio's clip at 1.2 anyway.
    ratio, advantages = torch.tensor([5.0, 5.0]), torch.tensor([-1.0, 1.0])
    assert clipped_surrogate(ratio, advantages, 0.2, 0.2)[0].tolist() == pytest.approx([-5.0, 1.2])
    assert clipped_surrogate(ratio, advantages, 0.2, 0.2, dual_clip=3.0)[0].tolist() == pytest.approx([-3.0, 1.2])


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)])
def test_the_kl_of_a_masked_slot_is_zero(kind: KLType, expected: float) -> None:
    # policy log(1/2), reference log(1/4): log r = -log 2 = -0.693147. k2 = 0.480453 / 2, k3 = 1/2 - 1 + 0.693147.
    policy = torch.tensor([math.log(1 / 2), NAN], requires_grad=True)
    kl = KLTerm(kind).estimate(policy, torch.tensor([math.log(1 / 4), math.inf]), torch.tensor([True, False]))
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([expected, 0.0], abs=1e-6)
    assert policy.grad is not None
    assert policy.grad[1] == 0.0


def test_metrics_count_trained_tokens_only() -> None:
    mask = torch.tensor([True, True, False])
    ratio = torch.tensor([0.5, 1.0, 9.0])
    found = values(ratio_metrics(ratio, ratio.clamp(0.8, 1.2), mask))
    assert found["probs_ratio"] == pytest.approx(0.75)
    assert (found["probs_ratio_min"], found["probs_ratio_max"]) == (0.5, 1.0)
    assert found["probs_ratio_clamped"] == pytest.approx(0.9)  # (0.8 + 1) / 2
    assert found["probs_ratio_clamped_frac"] == 0.5


def test_a_ratio_counts_as_clipped_where_the_clip_decides() -> None:
    # Within [0.8, 1.2]; a clip takes the gradient from high ratios with A > 0 and low ones with A < 0 alone.
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0, 1.5, 0.5])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0, 1.0])
    mask = torch.tensor([True] * 6 + [False])
    found = values(ratio_metrics(ratio, ratio.clamp(0.8, 1.2), mask, advantages))
    assert found["probs_ratio_clamped_frac"] == pytest.approx(2 / 6)
    assert found["probs_ratio_clamped_low_frac"] == pytest.approx(1 / 6)  # 0.5 with A < 0
    assert found["probs_ratio_clamped_high_frac"] == pytest.approx(1 / 6)  # 1.5 with A > 0

    # verl's pg_clipfrac: how often max(-A r, -A clip(r)) is the second and larger than the first.
    surrogate, other = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    assert found["probs_ratio_clamped_frac"] == pytest.approx(float((other > surrogate)[mask].float().mean()))


def test_entropy_is_that_of_the_sampled_tokens() -> None:
    # policy = sampler: -(log 1/2 + log 1/4) / 2 = 1.5 log 2. Both times old is e^0.1 times what the sampler says.
    policy = torch.log(torch.tensor([1 / 2, 1 / 4, 1.0]))
    mask = torch.tensor([True, True, False])
    found = values(sampler_metrics(policy, policy + 0.1, torch.where(mask, policy, NAN), mask))
    assert found["approx_entropy"] == pytest.approx(1.5 * math.log(2))
    assert found["sampling_importance_ratio"] == pytest.approx(math.exp(0.1))
    assert found["token_mult_prob_error"] == pytest.approx(math.exp(0.1))
