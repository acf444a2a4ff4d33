"""What the KL estimators are worth in expectation, by enumeration of a vocabulary of three.

# N = tokens of all sequences concatenated

policy pi = (1/2, 1/4, 1/4) = softmax(theta), reference rho = (1/4, 1/4, 1/2), log 2 = 0.693147:

KL(pi || rho) = 1/2 log 2 + 0 - 1/4 log 2                                               = 0.173287
its gradient, pi_j * (log(pi_j / rho_j) - KL)                 = ( 0.259930, -0.043322, -0.216608)
gradient of KL(rho || pi), pi_j - rho_j                       = ( 0.25,      0,        -0.25    )
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.metrics import values
from nemorl_tensors import KLTerm, TokenBatch
from torch import Tensor

NAN = float("nan")
POLICY = torch.tensor([0.5, 0.25, 0.25])
REFERENCE = torch.tensor([0.25, 0.25, 0.5]).log()
SAMPLER = torch.tensor([0.2, 0.3, 0.5])
REVERSE_KL = 0.173287
REVERSE = [0.259930, -0.043322, -0.216608]
FORWARD = [0.25, 0.0, -0.25]
EVERYWHERE = torch.ones(3, dtype=torch.bool)


def expected(term: KLTerm, drawn_from: Tensor) -> tuple[float, list[float]]:
    """Mean of the term over tokens drawn from ``drawn_from``, and the mean of its gradient in theta."""
    theta = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(theta, 0)
    mean = (drawn_from * term.loss_term(logprobs, REFERENCE, drawn_from.log(), EVERYWHERE)).sum()
    mean.backward()
    assert theta.grad is not None
    return float(mean.detach()), theta.grad.tolist()


# k2 is biased: (1/2 + 1/4) * (log 2)^2 / 2 = 0.180170.
@pytest.mark.parametrize(
    ("kind", "gradient", "value", "slopes"),
    [
        ("k1", "estimator", REVERSE_KL, [0.0, 0.0, 0.0]),
        ("k2", "estimator", 0.180170, REVERSE),
        ("k3", "estimator", REVERSE_KL, FORWARD),
        ("k1", "unbiased", REVERSE_KL, REVERSE),
        ("k2", "unbiased", 0.180170, REVERSE),
        ("k3", "unbiased", REVERSE_KL, REVERSE),
    ],
)
def test_value_and_gradient_of_each_estimator_in_expectation(
    kind: Any, gradient: Any, value: float, slopes: list[float]
) -> None:
    found, found_slopes = expected(KLTerm(kind, gradient=gradient), POLICY)
    assert found == pytest.approx(value, abs=1e-6)
    assert found_slopes == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize(("kind", "value"), [("k1", REVERSE_KL), ("k2", 0.180170), ("k3", REVERSE_KL)])
def test_importance_weights_make_tokens_of_another_policy_count_right(kind: Any, value: float) -> None:
    found, slopes = expected(KLTerm(kind, weighted_by="generation"), SAMPLER)
    assert found == pytest.approx(value, abs=1e-6)
    assert slopes == pytest.approx(REVERSE, abs=1e-6)
    _, unweighted = expected(KLTerm(kind), SAMPLER)
    assert unweighted != pytest.approx(REVERSE, abs=1e-2)


@pytest.mark.parametrize(("kind", "slopes"), [("k1", [0.0, 0.0, 0.0]), ("k2", REVERSE), ("k3", FORWARD)])
def test_importance_weights_keep_the_chosen_gradient(kind: Any, slopes: list[float]) -> None:
    _, found = expected(KLTerm(kind, gradient="estimator", weighted_by="generation"), SAMPLER)
    assert found == pytest.approx(slopes, abs=1e-6)


# A reward multiplies the score: E[k * dlog pi]. Of k3 that is the reverse less the forward gradient.
@pytest.mark.parametrize(
    ("kind", "slopes"),
    [("k1", REVERSE), ("k3", [reverse - forward for reverse, forward in zip(REVERSE, FORWARD, strict=True)])],
)
def test_in_the_reward_k1_alone_has_the_gradient_of_the_kl(kind: Any, slopes: list[float]) -> None:
    theta = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(theta, 0)
    charge = KLTerm(kind).estimate(logprobs.detach(), REFERENCE, EVERYWHERE)
    (POLICY * charge * logprobs).sum().backward()
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx(slopes, abs=1e-6)


def test_near_the_reference_k2_and_k3_in_the_reward_hold_nothing_back() -> None:
    # A policy 1 % off: the KL's gradient is about 1e-2, what k2 and k3 leave of it about its square.
    start = REFERENCE + torch.tensor([0.01, 0.0, -0.01])
    norms = {}
    for kind in ("k1", "k2", "k3"):
        theta = start.clone().requires_grad_()
        logprobs = torch.log_softmax(theta, 0)
        charge = KLTerm(kind).estimate(logprobs.detach(), REFERENCE, EVERYWHERE)
        (logprobs.detach().exp() * charge * logprobs).sum().backward()
        assert theta.grad is not None
        norms[kind] = float(theta.grad.norm())
    assert norms["k1"] > 3e-3
    assert norms["k2"] < 1e-4
    assert norms["k3"] < 1e-4


def test_k3_with_its_score_term_moves_as_k2_does_token_by_token() -> None:
    # d/dlog pi: (1 - r) + (r - 1 - log r) = -log r, k2's derivative.
    slopes = {}
    for kind in ("k2", "k3"):
        policy = torch.tensor([-0.5, -2.0, -1.0], requires_grad=True)
        KLTerm(kind).loss_term(policy, torch.tensor([-1.0, -1.5, -1.0]), policy.detach(), EVERYWHERE).sum().backward()  # type: ignore[arg-type]
        assert policy.grad is not None
        slopes[kind] = policy.grad.tolist()
    assert slopes["k3"] == pytest.approx([0.5, -0.5, 0.0], abs=1e-6)
    assert slopes["k3"] == pytest.approx(slopes["k2"], abs=1e-6)


# log ratios reference - policy of 3, -12, 25 and 0.5 nats. k3: e^3 - 4 = 16.09, 11, e^20 - 21, 0.148721. Slope -0.5.
@pytest.mark.parametrize("weighted", [False, True])
def test_beyond_either_clamp_there_is_no_gradient(weighted: bool) -> None:
    policy = torch.full((5,), -30.0, requires_grad=True)
    reference = torch.tensor([-27.0, -42.0, -5.0, -29.5, NAN])
    mask = torch.tensor([True, True, True, True, False])
    term = KLTerm(weighted_by="generation" if weighted else None)
    kl = term.loss_term(policy, reference, torch.full((5,), -30.0), mask)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([10.0, 10.0, 10.0, 0.148721, 0.0], abs=1e-6)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.5, 0.0], abs=1e-6)


def test_the_input_clamp_takes_the_score_term_with_it() -> None:
    # 3 nats off, clamped at 2: k1 is -2 without slope, where the score term alone would push by -2.
    policy = torch.tensor([-4.0], requires_grad=True)
    kl = KLTerm("k1", input_clamp=2.0).loss_term(policy, torch.tensor([-1.0]), policy.detach(), torch.tensor([True]))
    kl.sum().backward()
    assert kl.item() == -2.0
    assert policy.grad is not None
    assert policy.grad.item() == 0.0


def one_token_each() -> TokenBatch:
    """Every token of the vocabulary as one response, weighed by how often the policy draws it; nothing to gain."""
    shape = TokenBatch.from_sequences([[9, token] for token in range(3)], [[False, True]] * 3)
    spread = {"reference_logprobs": REFERENCE, "generation_logprobs": POLICY.log(), "old_logprobs": POLICY.log()}
    fields = {name: torch.stack([torch.full((3,), NAN), field], 1).flatten() for name, field in spread.items()}
    weights = torch.stack([torch.zeros(3), POLICY], 1).flatten()
    return replace(shape, loss_weights=weights).with_tokens(advantages=torch.zeros(6), **fields)


@pytest.mark.parametrize("on_policy", [False, True])
def test_a_kl_in_a_loss_has_the_gradient_of_the_kl(on_policy: bool) -> None:
    from nemorl_grpo.loss_cispo import CappedWeightLoss
    from nemorl_grpo.loss_gspo import SequenceRatioLoss
    from nemorl_ppo.loss import PPOLoss
    from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss

    for kind in (ClippedPolicyGradientLoss, SequenceRatioLoss, CappedWeightLoss, PPOLoss):
        theta = POLICY.log().requires_grad_()
        logprobs = torch.stack([torch.full((3,), NAN), torch.log_softmax(theta, 0)], 1).flatten()
        value, metrics = kind(kl_penalty=0.1, on_policy=on_policy)(logprobs, one_token_each())
        value.backward()
        assert theta.grad is not None
        assert float(value.detach()) == pytest.approx(0.1 * REVERSE_KL, abs=1e-6)
        assert theta.grad.tolist() == pytest.approx([0.1 * slope for slope in REVERSE], abs=1e-6)
        # k3 of the three tokens: -1/2 + log 2, 0 and 1 - log 2, unweighted.
        assert values(metrics)["kl_penalty"] == pytest.approx((math.log(2) - 0.5 + 1 - math.log(2)) / 3, abs=1e-6)
