"""The sign of a loss, on a bandit: a policy that says 1 or 2 to the prompt 0, and 1 is better.

# N = tokens of all sequences concatenated, V = vocabulary (3)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from nemorl_tensors import TokenBatch
from torch import Tensor


def slope_of_the_better(loss: Any, logits_V: Tensor, batch: TokenBatch) -> float:
    """How fast log p(1) rises along the negative gradient of the loss by the logits."""
    leaf = logits_V.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, 0)
    scored = batch["candidate_ids"] if "candidate_ids" in loss.requires else batch.token_ids
    mask = batch.mask.reshape(-1, *[1] * (scored.ndim - 1))
    outputs = torch.where(mask, logprobs[scored], math.nan)
    value = loss(outputs, batch)[0]
    if not value.requires_grad:
        return 0.0
    (slope,) = torch.autograd.grad(value.sum(), leaf, retain_graph=True)
    (uphill,) = torch.autograd.grad(logprobs[1], leaf)
    return -float(slope @ uphill)


def a_step_raises_the_better_action(loss: Any, logits_V: Tensor, batch: TokenBatch) -> None:
    """On a bandit, a gradient step makes the better action likelier."""
    slope = slope_of_the_better(loss, logits_V, batch)
    chance = float(torch.softmax(logits_V, 0)[1])
    assert slope > 0, (
        f"at p = {chance:.2f}, log p of the better action {'falls' if slope < 0 else 'stays'}: {slope:.4g}"
    )


def a_clip_lets_come_back(loss: Any, right: Tensor, wrong: Tensor, batch: TokenBatch) -> None:
    """A policy that has moved the wrong way since the rollout is led back: clipping holds the other way."""
    forward, back = slope_of_the_better(loss, right, batch), slope_of_the_better(loss, wrong, batch)
    assert back >= 0, f"where the better action has lost probability, it loses more: slope {back:.4g}"
    assert back > 0 or forward == 0, f"the slope is {forward:.4g} where it has gained, and none where it has lost"


def a_step_raises_the_better_value(loss: Any, values_V: Tensor, batch: TokenBatch) -> None:
    """Of two responses, a gradient step raises the value of the better one over that of the worse one."""
    leaf = values_V.clone().requires_grad_()
    outputs = torch.where(batch.mask, leaf[batch.token_ids], math.nan)
    (slope,) = torch.autograd.grad(loss(outputs, batch)[0].sum(), leaf)
    assert float(slope[1] - slope[2]) < 0, (
        f"at values {values_V[1:].tolist()} a step moves them by {(-slope[1:]).tolist()}"
    )


def a_step_brings_values_nearer(loss: Any, values_V: Tensor, batch: TokenBatch) -> None:
    """A gradient step brings values nearer to their returns."""
    leaf = values_V.clone().requires_grad_()
    outputs = torch.where(batch.mask, leaf[batch.token_ids], math.nan)
    error = torch.where(batch.mask, leaf[batch.token_ids] - batch["returns"], 0.0).square().sum()
    (slope,) = torch.autograd.grad(loss(outputs, batch)[0].sum(), leaf)
    (uphill,) = torch.autograd.grad(error, leaf)
    assert float(slope @ uphill) > 0, f"values {values_V.tolist()} move by {(-slope).tolist()}, away from their returns"
