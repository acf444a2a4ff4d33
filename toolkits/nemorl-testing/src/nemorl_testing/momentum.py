"""A check of what an optimizer does with a gradient that is zero, as where all of a batch's ratios are clipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_testing.backends import build_trainer, difference, weights_of
from nemorl_testing.batches import WeightedNLL, ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

LR = 1e-2
BETA_1, BETA_2 = 0.9, 0.999


@dataclass(frozen=True)
class Flat:
    """loss = 0 * sum of log-probs: it has a gradient, which is zero."""

    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return (outputs * 0.0).sum(), {}


def check_a_gradient_of_zero_goes_on_by_momentum(subject: Subject) -> None:
    """After a step, one whose gradient is zero is AdamW's: momentum moves the weights on. (DESIGN 7.5)

    By hand, for a gradient g and then 0: m is b1 (1 - b1) g and v is b2 (1 - b2) g^2 before their corrections by
    1 - b1^2 and 1 - b2^2, so the second step is b1 / (1 + b1) / sqrt(b2 / (1 + b2)) of the first, 0.670 of it.
    """
    if subject.settings.policy.get("lora"):
        raise NotApplicable("what is exported is a product of the adapters that are trained")
    adamw = {"lr": LR, "betas": (BETA_1, BETA_2), "eps": 1e-12, "weight_decay": 0.0}
    backend = build_trainer(subject, optimizer=adamw, max_grad_norm=None)
    at = [weights_of(backend)]
    for loss in (WeightedNLL(), Flat()):
        backend.train_step(ragged_batch(), loss)
        at.append(weights_of(backend))
    first, second = difference(at[1], at[0]), difference(at[2], at[1])
    wanted = BETA_1 / (1 + BETA_1) / (BETA_2 / (1 + BETA_2)) ** 0.5
    ratios = torch.cat([(second[name] / first[name])[first[name].abs() > LR / 2].flatten() for name in first])
    expect(len(ratios) > 0, "the first step moved nothing")
    worst = float((ratios - wanted).abs().max())
    expect(worst < 1e-3, f"the second step is up to {worst:.3g} away from {wanted:.4f} of the first")
