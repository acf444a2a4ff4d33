"""The losses of GSPO and CISPO, and the token credit of REINFORCE++, against numbers worked out by hand.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from nemorl.metrics import merge, values
from nemorl_grpo.loss_cispo import CappedWeightLoss
from nemorl_grpo.loss_gspo import SequenceRatioLoss
from nemorl_rl.policy_gradient.correction import Correction, IcePop, Plain, SequenceMask, Truncated
from nemorl_rl.policy_gradient.kl_charge import kl_to_go
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import KLTerm, TokenBatch, standardized
from nemorl_testing.batches import ragged_batch
from torch import Tensor

NAN = float("nan")
LOSSES: list[type] = [ClippedPolicyGradientLoss, SequenceRatioLoss, CappedWeightLoss]
KINDS: list[Correction] = [Plain(), Truncated(), IcePop(), SequenceMask(0.9, 1.2)]


def two_responses(*, old: float = -1.0, generation: float = -1.0, fill: float = NAN) -> TokenBatch:
    """Answers of 2 and 1 tokens, A = 1 both, level ``sequence``: weights 1/4, 1/4 and 1/2."""
    shape = TokenBatch.from_sequences(
        [[5, 6, 7], [5, 6]], [[False, True, True], [False, True]], loss_aggregation="sequence"
    )
    held = {"advantages": 1.0, "old_logprobs": old, "reference_logprobs": -1.5, "generation_logprobs": generation}
    return shape.with_tokens(**{name: torch.where(shape.mask, value, fill) for name, value in held.items()})


def graded(loss: Any, policy: Tensor, batch: TokenBatch) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient and metrics."""
    logprobs = policy.clone().requires_grad_()
    value, metrics = loss(logprobs, batch)
    value.backward()
    assert logprobs.grad is not None
    return float(value.detach()), logprobs.grad.tolist(), values(metrics)


# GSPO


def test_gspo_clips_the_geometric_mean_of_a_response() -> None:
    # First response: log ratios 0.2 and 0.4, mean 0.3, ratio e^0.3 = 1.349859 <= 1.5: surrogate 1.349859.
    # Second: log ratio 0.6, ratio e^0.6 = 1.822119, clipped to 1.5, no gradient.
    # loss = -(1.349859 + 1.5) / 2. Each token of the first: -1/2 * 1.349859 * d mean / d token = 1/2.
    loss = SequenceRatioLoss(clip_low=0.2, clip_high=0.5)
    value, gradient, metrics = graded(loss, torch.tensor([NAN, -0.8, -0.6, NAN, -0.4]), two_responses())
    assert value == pytest.approx(-1.424929, abs=1e-6)
    assert gradient == pytest.approx([0, -0.337465, -0.337465, 0, 0], abs=1e-6)
    # Metrics are those of responses: one of two is clipped.
    assert metrics["probs_ratio"] == pytest.approx((1.349859 + 1.822119) / 2, abs=1e-6)
    assert metrics["probs_ratio_clamped"] == pytest.approx((1.349859 + 1.5) / 2, abs=1e-6)
    assert metrics["probs_ratio_clamped_frac"] == 0.5


def test_gspo_keeps_a_token_that_alone_would_be_clipped() -> None:
    # Log ratios 1.0 and -1.0: far out as tokens, mean 0 as a response. Gradient -1/2 * 1 * 1/2 each.
    loss = SequenceRatioLoss()
    _, gradient, metrics = graded(loss, torch.tensor([NAN, 0.0, -2.0, NAN, -1.0]), two_responses())
    assert gradient == pytest.approx([0, -0.25, -0.25, 0, -0.5])
    assert metrics["probs_ratio_clamped_frac"] == 0.0


@pytest.mark.parametrize(
    ("correction", "weight", "out_of_bounds"),
    [
        (Plain(), 1.221403, None),  # e^0.2
        (Truncated(cap=1.1), 1.1, 2 / 3),  # tokens, and both of the first response share its weight
        (IcePop(low=0.5, high=1.1), 0.0, 2 / 3),
        (SequenceMask(low=0.9, high=1.1), 0.0, 1 / 2),
        (SequenceMask(low=0.9, high=1.3), 1.221403, 0.0),
    ],
)
def test_gspo_corrects_by_the_geometric_mean_of_a_response(
    correction: Correction, weight: float, out_of_bounds: float | None
) -> None:
    # old - generation is 0.4 and 0.0 in the first response: mean 0.2. The second agrees: weight 1. On policy.
    sampled = torch.tensor([NAN, -1.4, -1.0, NAN, -1.0])
    batch = two_responses().with_tokens(generation_logprobs=sampled)
    policy = torch.tensor([NAN, -1.0, -1.0, NAN, -1.0])
    value, gradient, metrics = graded(SequenceRatioLoss(on_policy=True, correction=correction), policy, batch)
    assert value == pytest.approx(-(weight + 1) / 2, abs=1e-6)
    assert gradient == pytest.approx([0, -weight / 4, -weight / 4, 0, -0.5], abs=1e-6)
    assert metrics.get("is_oob_ratio") == (None if out_of_bounds is None else pytest.approx(out_of_bounds))


def test_gspo_times_a_plain_correction_is_the_ratio_against_the_sampler() -> None:
    # policy - old is 0.3 on average, old - generation 0.2: together e^0.5 = 1.648721 for the first response.
    batch = two_responses().with_tokens(generation_logprobs=torch.tensor([NAN, -1.4, -1.0, NAN, -1.0]))
    loss = SequenceRatioLoss(clip_low=0.9, clip_high=10.0, correction=Plain())
    value, _, _ = graded(loss, torch.tensor([NAN, -0.8, -0.6, NAN, -1.0]), batch)
    assert value == pytest.approx(-(1.648721 + 1) / 2, abs=1e-6)


# CISPO


@pytest.mark.parametrize(
    ("cap", "value", "slope"),
    [
        (5.0, 1.648721 * 0.5, -1.648721),  # ratio e^0.5, not capped: -weight * A * policy with policy = -0.5
        (1.2, 1.2 * 0.5, -1.2),  # capped, and the gradient is bounded but not gone: GRPO's would be 0
    ],
)
def test_cispo_caps_the_weight_and_keeps_the_gradient(cap: float, value: float, slope: float) -> None:
    policy = torch.tensor([NAN, -0.5, -1.0, NAN, -1.0])
    found, gradient, metrics = graded(CappedWeightLoss(ratio_cap=cap), policy, two_responses())
    # The other tokens: weight 1, policy -1. Loss weights 1/4, 1/4 and 1/2.
    assert found == pytest.approx(value / 4 + 1 / 4 + 1 / 2, abs=1e-6)
    assert gradient == pytest.approx([0, slope / 4, -0.25, 0, -0.5], abs=1e-6)
    assert metrics["probs_ratio_clamped_frac"] == pytest.approx(1 / 3 if cap < 1.6 else 0.0)


def test_cispo_has_no_lower_bound() -> None:
    # ratio e^-2 = 0.135335: a weight as it is.
    _, gradient, _ = graded(CappedWeightLoss(), torch.tensor([NAN, -3.0, -1.0, NAN, -1.0]), two_responses())
    assert gradient[1] == pytest.approx(-0.135335 / 4, abs=1e-6)


# All of them


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_the_gradient_is_that_of_reinforce(kind: type) -> None:
    # A ratio of 1 leaves -A * loss weight; GSPO spreads a response's over its tokens, which is the same here.
    policy = torch.tensor([NAN, -0.3, -2.0, NAN, -1.1])
    _, gradient, metrics = graded(kind(on_policy=True), policy, two_responses(generation=-1.3))
    assert gradient == pytest.approx([0, -0.25, -0.25, 0, -0.5])
    assert metrics["probs_ratio"] == 1.0


@pytest.mark.parametrize("kind", LOSSES)
def test_a_kl_penalty_adds_to_any_of_them(kind: type) -> None:
    # policy -1, reference -1.5: k2 = 0.5^2 / 2 = 0.125, slope 0.5, both times 0.1 and the loss weight.
    policy, batch = torch.tensor([NAN, -1.0, -1.0, NAN, -1.0]), two_responses()
    plain = graded(kind(), policy, batch)
    penalized = graded(kind(kl_penalty=0.1, kl=KLTerm("k2")), policy, batch)
    assert penalized[0] - plain[0] == pytest.approx(0.0125, abs=1e-6)
    slopes = [after - before for after, before in zip(penalized[1], plain[1], strict=True)]
    assert slopes == pytest.approx([0, 0.0125, 0.0125, 0, 0.025], abs=1e-6)
    assert penalized[2]["kl_penalty"] == pytest.approx(0.125)
    assert kind(kl_penalty=0.1).requires == kind().requires | {"reference_logprobs"}
    assert kind(on_policy=True).requires == {"advantages", "generation_logprobs"}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("correction", [None, *KINDS], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("fill", [NAN, math.inf, -math.inf, 1e30])
def test_masked_slots_may_hold_anything(
    kind: type, correction: Correction | None, on_policy: bool, fill: float
) -> None:
    loss = kind(kl_penalty=0.1, on_policy=on_policy, correction=correction)
    found = []
    for held in (0.0, fill):
        batch = two_responses(generation=-1.1, fill=held)
        policy = torch.where(batch.mask, torch.tensor([0, -0.8, -1.3, 0, -0.9]), held)
        found.append(graded(loss, policy, batch))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_batch_with_nothing_to_train_gives_zero(kind: type) -> None:
    shape = TokenBatch.from_sequences([[1, 2, 3]], [[False, False, False]])
    names = ("advantages", "old_logprobs", "reference_logprobs", "generation_logprobs")
    batch = shape.with_tokens(**dict.fromkeys(names, torch.full((3,), NAN)))
    value, gradient, _ = graded(kind(kl_penalty=0.1, correction=SequenceMask()), torch.full((3,), NAN), batch)
    assert (value, gradient) == (0.0, [0.0, 0.0, 0.0])


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("correction", [None, *KINDS], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sharding_changes_neither_loss_nor_metrics(kind: type, correction: Correction | None, ranks: int) -> None:
    batch, generator = ragged_batch(), torch.Generator().manual_seed(5)
    sampled = torch.randn(batch.num_tokens, generator=generator) - 3
    gap = 0.1 * torch.randn(batch.num_tokens, generator=generator)
    fields = {"generation_logprobs": sampled, "old_logprobs": sampled + gap, "policy": sampled + 2 * gap}
    batch = batch.with_tokens(**{name: torch.where(batch.mask, field, NAN) for name, field in fields.items()})
    loss = kind(correction=correction)
    whole, metrics = loss(batch["policy"], batch)
    shards = [batch.select(shard) for shard in batch.shards(ranks)]
    parts = [loss(shard["policy"], shard) for shard in shards]
    assert float(sum(value for value, _ in parts)) == pytest.approx(float(whole), rel=1e-5, abs=1e-7)
    assert values(merge([part for _, part in parts])) == pytest.approx(values(metrics), rel=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_travels_by_value(kind: type) -> None:
    loss = kind(kl_penalty=0.2, correction=Truncated())
    assert pickle.loads(pickle.dumps(loss)) == loss


# The token credit of REINFORCE++

SHAPE = TokenBatch.from_sequences([[1, 2, 3, 4], [1, 2, 3]], [[False, True, False, True], [False, True, True]])
OLD = torch.tensor([NAN, -1.0, NAN, -1.2, NAN, -1.0, -1.0])
REFERENCE = torch.tensor([NAN, -1.5, NAN, -1.0, NAN, -1.1, -1.4])


def test_a_token_answers_for_its_kl_and_all_that_follows() -> None:
    # old - reference: 0.5 and -0.2 in the first (an observation between them), 0.1 and 0.4 in the second.
    to_go = kl_to_go(OLD - REFERENCE, SHAPE.mask, SHAPE.lengths)
    assert to_go.tolist() == pytest.approx([0, 0.3, 0, -0.2, 0, 0.5, 0.4], abs=1e-6)


def test_advantages_are_normalized_over_tokens_by_hand() -> None:
    # Rewards 1 and 0 less the KL to go: 0.7, 1.2, -0.5, -0.4. Mean 0.25, deviations 0.45, 0.95, -0.75, -0.65,
    # variance (0.2025 + 0.9025 + 0.5625 + 0.4225) / 4 = 0.5225, std 0.722842.
    returns = torch.tensor([1.0, 1, 1, 1, 0, 0, 0]) - kl_to_go(OLD - REFERENCE, SHAPE.mask, SHAPE.lengths)
    returns = torch.where(SHAPE.mask, returns, NAN)
    normalized = standardized(returns, SHAPE.mask, unbiased=False)
    assert normalized.tolist() == pytest.approx([0, 0.622543, 0, 1.314257, 0, -1.037571, -0.899228], abs=1e-5)


def test_equal_returns_are_not_divided_by_their_rounding_noise() -> None:
    assert standardized(torch.full((7,), 0.1), SHAPE.mask, unbiased=False).abs().max() < 1e-7
    assert standardized(torch.full((7,), NAN), torch.zeros(7, dtype=torch.bool), unbiased=False).tolist() == [0.0] * 7


def test_a_long_batch_keeps_the_digits_of_its_last_sequence() -> None:
    # 100,000 sequences of KL 1000 before one of 0.1: a float32 running sum of 1e8 has steps of 8.
    lengths = torch.full((100_001,), 2)
    mask = torch.tensor([False, True]).repeat(100_001)
    old = torch.zeros(200_002)
    reference = torch.where(mask, -1000.0, 0.0)
    reference[-1] = -0.1
    assert float(kl_to_go(old - reference, mask, lengths)[-1]) == pytest.approx(0.1, abs=1e-6)
