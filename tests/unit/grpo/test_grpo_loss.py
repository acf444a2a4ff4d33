"""GRPO's objective against numbers worked out by hand, one trained token at a time.

# N = tokens of all sequences concatenated. A sequence here is one prompt token and one or more answer tokens.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from nemorl.errors import UsageError
from nemorl.metrics import values
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import KLTerm, TokenBatch
from recorded_messages import Raises
from torch import Tensor

NAN = float("nan")


def one_token(advantage: float, old: float = -1.0, reference: float = -1.0, generation: float = -1.0) -> TokenBatch:
    """Prompt token, answer token. The prompt's slots hold NaN."""
    return TokenBatch.from_sequences([[5, 6]], [[False, True]]).with_tokens(
        advantages=torch.tensor([NAN, advantage]),
        old_logprobs=torch.tensor([NAN, old]),
        reference_logprobs=torch.tensor([NAN, reference]),
        generation_logprobs=torch.tensor([NAN, generation]),
    )


def evaluate(loss: ClippedPolicyGradientLoss, policy: float, batch: TokenBatch) -> tuple[float, float]:
    """Loss and its slope at the trained token."""
    logprobs = torch.tensor([NAN, policy], requires_grad=True)
    value, _ = loss(logprobs, batch)
    value.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] == 0.0
    return float(value.detach()), float(logprobs.grad[1])


# old = -1, so policy = -0.5 is a ratio of e^0.5 = 1.648721 and policy = -1.5 one of e^-0.5 = 0.606531.
@pytest.mark.parametrize(
    ("policy", "advantage", "expected", "slope"),
    [
        (-0.5, 1.0, -1.2, 0.0),  # min(1.6487, 1.2): enough of a good thing
        (-0.5, -1.0, 1.648721, 1.648721),  # min(-1.6487, -1.2): a bad token grew, push back in full
        (-1.5, 1.0, -0.606531, -0.606531),  # min(0.6065, 0.8): a good token shrank, push back in full
        (-1.5, -1.0, 0.8, 0.0),  # min(-0.6065, -0.8): enough
        (-0.9, 2.0, -2 * 1.105171, -2 * 1.105171),  # e^0.1 is within [0.8, 1.2]
    ],
)
def test_the_ratio_is_clipped_where_it_went_too_far(
    policy: float, advantage: float, expected: float, slope: float
) -> None:
    value, gradient = evaluate(ClippedPolicyGradientLoss(), policy, one_token(advantage))
    assert value == pytest.approx(expected, abs=1e-5)
    assert gradient == pytest.approx(slope, abs=1e-5)


def test_the_two_bounds_are_independent() -> None:
    loss = ClippedPolicyGradientLoss(clip_low=0.1, clip_high=0.28)
    assert evaluate(loss, -0.5, one_token(1.0))[0] == pytest.approx(-1.28)
    assert evaluate(loss, -1.5, one_token(-1.0))[0] == pytest.approx(0.9)


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    # ratio e^2 = 7.389056 at A = -1: 7.389 without, 3 with dual_clip = 3. Below the bound nothing changes.
    assert evaluate(ClippedPolicyGradientLoss(), 1.0, one_token(-1.0))[0] == pytest.approx(7.389056, abs=1e-5)
    bounded = ClippedPolicyGradientLoss(dual_clip=3.0)
    assert evaluate(bounded, 1.0, one_token(-1.0)) == (3.0, 0.0)
    assert evaluate(bounded, -0.5, one_token(-1.0))[0] == pytest.approx(1.648721, abs=1e-5)
    assert evaluate(bounded, 1.0, one_token(1.0))[0] == pytest.approx(-1.2)


# policy log(1/2), reference log(1/4): r = 1/2, log r = -0.693147; derivatives d/d policy are 1, -log r and 1 - r. The
# score-function term adds the KL itself to those of k1 and k3.
@pytest.mark.parametrize(
    ("kind", "gradient", "kl", "slope"),
    [
        ("k2", "estimator", 0.240227, 0.693147),
        ("k3", "estimator", 0.193147, 0.5),
        ("k1", "unbiased", 0.693147, 1.693147),
        ("k2", "unbiased", 0.240227, 0.693147),
        ("k3", "unbiased", 0.193147, 0.693147),
    ],
)
def test_the_kl_penalty_by_hand(kind: Any, gradient: Any, kl: float, slope: float) -> None:
    policy, reference = math.log(1 / 2), math.log(1 / 4)
    loss = ClippedPolicyGradientLoss(kl_penalty=0.1, kl=KLTerm(kind, gradient=gradient), on_policy=True)
    value, gradient = evaluate(loss, policy, one_token(2.0, reference=reference))
    assert value == pytest.approx(-2.0 + 0.1 * kl, abs=1e-6)
    assert gradient == pytest.approx(-2.0 + 0.1 * slope, abs=1e-6)


def three_and_one(level: str) -> TokenBatch:
    """Answers of 3 and 1 tokens with advantages 1 and -1; everything else agrees with the policy's -1."""
    return TokenBatch.from_sequences(
        [[1, 2, 3, 4], [1, 2]], [[False, True, True, True], [False, True]], loss_aggregation=level
    ).with_tokens(  # type: ignore[arg-type]
        advantages=torch.tensor([1.0, 1, 1, 1, -1, -1]), generation_logprobs=torch.full((6,), -1.0)
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", -0.5),  # -(1 + 1 + 1 - 1) / 4
        ("sequence", 0.0),  # -((1 + 1 + 1) / 3 + (-1) / 1) / 2
    ],
)
def test_the_level_decides_what_is_averaged(level: str, expected: float) -> None:
    value, _ = ClippedPolicyGradientLoss(on_policy=True)(torch.full((6,), -1.0), three_and_one(level))
    assert float(value) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_on_policy_the_ratio_is_one_and_the_gradient_is_minus_advantage_times_weight(level: str) -> None:
    batch = three_and_one(level)
    logprobs = torch.tensor([-9.0, -0.1, -2.3, -0.7, -9, -4.4], requires_grad=True)
    value, metrics = ClippedPolicyGradientLoss(on_policy=True)(logprobs, batch)
    value.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -batch["advantages"] * batch.loss_weights)
    numbers = values(metrics)
    assert [numbers[f"probs_ratio{end}"] for end in ("", "_min", "_max", "_clamped")] == [1.0, 1.0, 1.0, 1.0]
    assert numbers["probs_ratio_clamped_frac"] == 0.0


def test_on_policy_equals_old_logprobs_of_the_same_weights() -> None:
    batch, logprobs = three_and_one("token"), torch.tensor([-9.0, -0.1, -2.3, -0.7, -9, -4.4])
    short, _ = ClippedPolicyGradientLoss(on_policy=True)(logprobs, batch)
    long, _ = ClippedPolicyGradientLoss()(logprobs, batch.with_tokens(old_logprobs=logprobs.clone()))
    assert torch.equal(short, long)


def fields(batch: TokenBatch, fill: float) -> TokenBatch:
    """Random fields on the trained slots of ``batch``, ``fill`` everywhere else."""
    generator = torch.Generator().manual_seed(3)
    names = ("advantages", "old_logprobs", "reference_logprobs", "generation_logprobs")
    drawn = {name: torch.randn(batch.num_tokens, generator=generator) for name in names}
    return batch.with_tokens(**{name: torch.where(batch.mask, drawn[name], fill) for name in names})


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("fill", [NAN, math.inf, -math.inf, 1e30])
def test_masked_slots_may_hold_anything(on_policy: bool, kind: Any, dual_clip: float | None, fill: float) -> None:
    shape = three_and_one("sequence")
    loss = ClippedPolicyGradientLoss(dual_clip=dual_clip, kl_penalty=0.1, kl=KLTerm(kind), on_policy=on_policy)
    results: list[tuple[Tensor, Tensor, dict[str, float]]] = []
    for held in (0.0, fill):
        drawn = torch.randn(6, generator=torch.Generator().manual_seed(4))
        logprobs = torch.where(shape.mask, drawn, held).requires_grad_()
        value, metrics = loss(logprobs, fields(shape, held))
        value.backward()
        assert logprobs.grad is not None
        results.append((value.detach(), logprobs.grad, values(metrics)))
    (clean_value, clean_grad, clean_metrics), (value, grad, metrics_of_fill) = results
    assert torch.equal(value, clean_value)
    assert torch.equal(grad, clean_grad)
    assert metrics_of_fill == clean_metrics


def test_a_batch_with_nothing_to_train_gives_zero() -> None:
    batch = fields(TokenBatch.from_sequences([[1, 2, 3]], [[False, False, False]]), NAN)
    logprobs = torch.full((3,), NAN, requires_grad=True)
    value, metrics = ClippedPolicyGradientLoss(kl_penalty=0.1)(logprobs, batch)
    value.backward()
    assert float(value.detach()) == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    assert "probs_ratio_max" not in values(metrics)


def test_the_sampler_mismatch_by_hand() -> None:
    # old = -1, generation = -1.2: gap 0.2. e^0.2 = 1.221403; k3 of log r = 0.2: 1.221403 - 1 - 0.2 = 0.021403.
    # policy = -0.5: entropy estimate -e^(-0.5 + 1.2) * -0.5 = e^0.7 * 0.5 = 1.006876.
    _, metrics = ClippedPolicyGradientLoss()(torch.tensor([NAN, -0.5]), one_token(1.0, generation=-1.2))
    numbers = values(metrics)
    assert numbers["token_mult_prob_error"] == pytest.approx(1.221403, abs=1e-5)
    assert numbers["sampling_importance_ratio"] == pytest.approx(1.221403, abs=1e-5)
    assert numbers["gen_kl_error"] == pytest.approx(0.021403, abs=1e-5)
    assert numbers["approx_entropy"] == pytest.approx(1.006876, abs=1e-5)


def test_the_clipped_fraction_counts_tokens() -> None:
    batch = three_and_one("token").with_tokens(old_logprobs=torch.full((6,), -1.0))
    # Ratios e^0, e^0.5, e^-0.5 and e^0.1: two of four leave [0.8, 1.2]; with A > 0 the clip decides of one.
    _, metrics = ClippedPolicyGradientLoss()(torch.tensor([0, -1.0, -0.5, -1.5, 0, -0.9]), batch)
    assert values(metrics)["probs_ratio_clamped_frac"] == 0.25


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"advantages", "generation_logprobs", "old_logprobs"}),
        ({"on_policy": True}, {"advantages", "generation_logprobs"}),
        ({"on_policy": True, "kl_penalty": 0.1}, {"advantages", "generation_logprobs", "reference_logprobs"}),
    ],
)
def test_the_loss_says_which_fields_it_reads(options: dict[str, Any], fields: set[str]) -> None:
    assert ClippedPolicyGradientLoss(**options).requires == fields


def test_a_missing_field_is_named(raises: Raises) -> None:
    with raises(UsageError, "old_logprobs"):
        ClippedPolicyGradientLoss()(torch.zeros(6), three_and_one("token"))


def test_a_loss_travels_by_value() -> None:
    loss = ClippedPolicyGradientLoss(clip_high=0.28, kl=KLTerm("k2"))
    assert pickle.loads(pickle.dumps(loss)) == loss
