"""PPO's two objectives against numbers worked out by hand.

# N = tokens of all sequences concatenated. A sequence here is one prompt token and one or more answer tokens.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from nemorl.metrics import merge, values
from nemorl_ppo.loss import PPOLoss
from nemorl_ppo.value_loss import ValueLoss
from nemorl_rl.policy_gradient.correction import Truncated
from nemorl_tensors import KLTerm, TokenBatch
from torch import Tensor

NAN = float("nan")


def answers(*advantages: float, fill: float = NAN) -> TokenBatch:
    """A prompt token, then one token per advantage; old, reference and sampler agree on -1. Other slots: ``fill``."""
    count = len(advantages)
    fields = {"advantages": advantages, "old_logprobs": [-1.0] * count, "generation_logprobs": [-1.0] * count}
    fields["reference_logprobs"] = [-1.0] * count
    fields["positive_weights"] = [1 / count] * count
    mask = [False] + [True] * count
    batch = TokenBatch.from_sequences([[5] * (count + 1)], [mask])
    tensors = {name: torch.tensor([fill, *given]) for name, given in fields.items()}
    tensors["positive_weights"][0] = 0.0
    return batch.with_tokens(**tensors)


def evaluate(loss: PPOLoss | ValueLoss, given: list[float], batch: TokenBatch) -> tuple[float, list[float]]:
    """Loss, and its slope at the trained tokens."""
    outputs = torch.tensor([NAN, *given], requires_grad=True)
    value, _ = loss(outputs, batch)
    value.backward()
    assert outputs.grad is not None
    assert outputs.grad[0] == 0.0
    return float(value.detach()), outputs.grad[1:].tolist()


def test_the_surrogate_is_averaged_over_tokens() -> None:
    # Ratios e^0.5 = 1.648721 (clipped to 1.2 at A = 1) and e^-0.5 = 0.606531 (kept at A = 2):
    # -(1.2 + 1.213061) / 2; slopes 0 and -0.606531 * 2 / 2.
    value, slopes = evaluate(PPOLoss(), [-0.5, -1.5], answers(1.0, 2.0))
    assert value == pytest.approx(-(1.2 + 1.213061) / 2, abs=1e-6)
    assert slopes == pytest.approx([0.0, -0.606531], abs=1e-6)


def test_a_correction_weighs_the_surrogate_and_not_the_kl() -> None:
    # The old policy found tokens e^0 and e^ln(4) times as likely as the sampler did: weights 1 and min(4, 2). Ratios 1:
    # -(1 * 1 + 2 * 3) / 2 = -3.5. The KL to a reference 1 nat below is k1's 1 nat, weighed by 0.5 and by nothing else.
    batch = answers(1.0, 3.0).with_tokens(generation_logprobs=torch.tensor([NAN, -1.0, -1.0 - math.log(4.0)]))
    loss = PPOLoss(correction=Truncated(cap=2.0))
    assert evaluate(loss, [-1.0, -1.0], batch) == (pytest.approx(-3.5), [pytest.approx(-0.5), pytest.approx(-3.0)])
    far = batch.with_tokens(reference_logprobs=torch.tensor([NAN, -2.0, -2.0]))
    held = replace(loss, kl_penalty=0.5, kl=KLTerm("k1"))
    assert evaluate(held, [-1.0, -1.0], far)[0] == pytest.approx(-3.5 + 0.5)


def test_bounds_and_dual_clip_reach_the_surrogate() -> None:
    loss = PPOLoss(clip_low=0.1, clip_high=0.28, dual_clip=3.0)
    assert evaluate(loss, [-0.5], answers(1.0))[0] == pytest.approx(-1.28)
    assert evaluate(loss, [-1.5], answers(-1.0))[0] == pytest.approx(0.9)
    assert evaluate(loss, [1.0], answers(-1.0)) == (3.0, [0.0])  # e^2 = 7.389 without


def test_the_kl_term_is_added_per_token() -> None:
    # ratio 1 on policy; policy - reference = log 2: k3 = 1/2 - 1 + log 2 = 0.193147, slope (1 - 1/2) + k3.
    batch = answers(2.0).with_tokens(reference_logprobs=torch.tensor([NAN, -1.0 - math.log(2)]))
    value, slopes = evaluate(PPOLoss(kl_penalty=0.1, on_policy=True), [-1.0], batch)
    assert value == pytest.approx(-2.0 + 0.0193147, abs=1e-6)
    assert slopes == pytest.approx([-2.0 + 0.0693147], abs=1e-6)


def test_right_responses_are_imitated() -> None:
    # Advantage 0, so only the imitation is left: two right tokens among three, weights 1/2 each.
    weights = torch.tensor([0.0, 0.5, 0.5, 0.0])
    batch = answers(0.0, 0.0, 0.0).with_tokens(positive_weights=weights)
    value, slopes = evaluate(PPOLoss(positive_nll_weight=0.1), [-1.0, -3.0, -9.0], batch)
    assert value == pytest.approx(0.1 * (1.0 + 3.0) / 2)
    assert slopes == pytest.approx([-0.05, -0.05, 0.0])


def test_the_imitation_adds_up_over_microbatches() -> None:
    whole = TokenBatch.from_sequences([[1, 2, 3], [1, 2]], [[False, True, True], [False, True]]).with_tokens(
        advantages=torch.randn(5, generator=torch.Generator().manual_seed(1)),
        generation_logprobs=torch.full((5,), -1.0),
        positive_weights=torch.tensor([0.0, 1 / 3, 1 / 3, 0.0, 1 / 3]),
    )
    loss, logprobs = PPOLoss(positive_nll_weight=0.5, on_policy=True), torch.tensor([0.0, -1, -2, 0, -4])
    value, metrics = loss(logprobs, whole)
    parts = [loss(logprobs[:3], whole.select([0])), loss(logprobs[3:], whole.select([1]))]
    assert float(sum(part for part, _ in parts)) == pytest.approx(float(value))
    merged = values(merge([found for _, found in parts]))
    assert merged["positive_nll_loss"] == pytest.approx(7 / 3)
    assert merged == pytest.approx(values(metrics))


def test_only_what_is_asked_for_is_required() -> None:
    assert PPOLoss(on_policy=True).requires == {"advantages", "generation_logprobs"}
    assert PPOLoss().requires == {"advantages", "generation_logprobs", "old_logprobs"}
    everything = {"advantages", "generation_logprobs", "old_logprobs", "reference_logprobs", "positive_weights"}
    assert PPOLoss(kl_penalty=0.1, positive_nll_weight=0.1).requires == everything
    assert ValueLoss().requires == {"returns"}
    assert ValueLoss(0.2).requires == {"returns", "old_values"}


def values_and_returns(old: list[float], returns: list[float], fill: float = NAN) -> TokenBatch:
    batch = TokenBatch.from_sequences([[5] * (len(old) + 1)], [[False] + [True] * len(old)])
    return batch.with_tokens(old_values=torch.tensor([fill, *old]), returns=torch.tensor([fill, *returns]))


def test_the_critic_minimises_half_the_squared_error() -> None:
    # Errors 1 and -3 over two tokens: (1 + 9) / 2 / 2; slopes 1/2 and -3/2.
    value, slopes = evaluate(ValueLoss(), [2.0, 1.0], values_and_returns([0.0, 0.0], [1.0, 4.0]))
    assert value == pytest.approx(2.5)
    assert slopes == pytest.approx([0.5, -1.5])


# old value 0, clip 0.2, return 1.
@pytest.mark.parametrize(
    ("value", "expected", "slope", "clipped"),
    [
        (0.1, 0.81 / 2, -0.9, 0.0),  # within the bound: (0.1 - 1)^2
        (0.5, 0.64 / 2, 0.0, 1.0),  # closer than 0.2 allows: (0.2 - 1)^2 and no reason to go on
        (-0.5, 2.25 / 2, -1.5, 0.0),  # went the wrong way: max((-0.5 - 1)^2, (-0.2 - 1)^2), pushed back in full
        (3.0, 4.0 / 2, 2.0, 0.0),  # shot past the return: (3 - 1)^2 is worse than (0.2 - 1)^2
    ],
)
def test_a_value_gains_nothing_beyond_the_clip(value: float, expected: float, slope: float, clipped: float) -> None:
    batch = values_and_returns([0.0], [1.0])
    assert evaluate(ValueLoss(0.2), [value], batch) == (pytest.approx(expected), pytest.approx([slope], abs=1e-6))
    _, metrics = ValueLoss(0.2)(torch.tensor([NAN, value]), batch)
    assert metrics["vf_clipfrac"].value == clipped


def test_rounding_is_not_clipping() -> None:
    # In float32, old + (value - old) differs from value in the last digit for a third of these.
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1000, generator=generator)
    batch = values_and_returns(old.tolist(), [0.3] * 1000)
    moved = torch.cat([torch.zeros(1), old + 0.1 * torch.randn(1000, generator=generator).clamp(-1, 1)])
    _, metrics = ValueLoss(0.2)(moved, batch)
    assert metrics["vf_clipfrac"].value == 0.0


@pytest.mark.parametrize("fill", [NAN, math.inf, -math.inf, 1e30])
def test_masked_slots_may_hold_anything(fill: float) -> None:
    policy = PPOLoss(dual_clip=3.0, kl_penalty=0.1, positive_nll_weight=0.1)
    found: list[tuple[float, list[float], dict[str, float]]] = []
    for held in (0.0, fill):
        for loss, batch in (
            (policy, answers(1.0, -2.0, fill=held)),
            (ValueLoss(0.1), values_and_returns([0.0, 0.5], [1.0, -1.0], fill=held)),
        ):
            outputs = torch.tensor([held, -0.3, -1.2], requires_grad=True)
            value, metrics = loss(outputs, batch)
            value.backward()
            assert isinstance(outputs.grad, Tensor)
            found.append((float(value.detach()), outputs.grad.tolist(), values(metrics)))
    assert found[:2] == found[2:]
    assert all(
        math.isfinite(number) for value, slopes, metrics in found for number in (value, *slopes, *metrics.values())
    )


@pytest.mark.parametrize("loss", [PPOLoss(dual_clip=3.0, kl=KLTerm("k2")), ValueLoss(0.2)])
def test_losses_travel_and_compare_by_value(loss: PPOLoss | ValueLoss) -> None:
    assert pickle.loads(pickle.dumps(loss)) == loss
