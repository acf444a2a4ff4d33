"""Checks of training backends on sequences that begin alike: each is scored and trained on as if it were alone.

A backend may compute what they have in common once, or once for each: nobody can tell from the numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nemorl_testing.backends import build_trainer, difference, expect_close, norm, weights_of
from nemorl_testing.batches import WeightedNLL, branching_batch
from nemorl_testing.kit import NotApplicable, Subject, expect

EXACT = 5e-6
"""Nats of a log-prob, and share of an update's norm: float32 sums in another order."""


def check_sequences_that_begin_alike_are_scored_as_alone(subject: Subject) -> None:
    """Sequences with tokens in common have the log-probs that each has in a batch of its own. (DESIGN 7.1)"""
    backend, batch = build_trainer(subject), branching_batch(temperature=0.8)
    alone = [backend.get_logprobs(batch.select([index])).cpu() for index in range(len(batch))]
    is_float32 = subject.settings.policy.get("precision", "float32") == "float32"
    tolerance = EXACT if is_float32 else subject.settings.tolerance
    expect_close(backend.get_logprobs(batch), torch.cat(alone), tolerance, "a log-prob beside a sequence like it")


def check_sequences_that_begin_alike_teach_as_alone(subject: Subject) -> None:
    """The update from sequences with tokens in common is that of each in a microbatch of its own. (DESIGN 7.5)"""
    if subject.settings.policy.get("precision", "float32") != "float32":
        raise NotApplicable("updates are compared in float32: rounded weights hide their differences")
    together, alone = _update(subject, 100_000), _update(subject, 1)
    gap, size = norm(difference(together, alone)), norm(alone)
    expect(size > 0, "the update is zero: this check proves nothing")
    expect(gap <= EXACT * size, f"the update is off by {gap / size:.3g} of its norm")


def _update(subject: Subject, microbatch_tokens: int) -> dict[str, Tensor]:
    """g / (|g| + 1) of the gradient g of the sum over tokens."""
    settings = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}
    backend = build_trainer(subject, optimizer=settings, microbatch_tokens=microbatch_tokens)
    batch, before = branching_batch(), weights_of(backend)
    backend.train_step(replace(batch, loss_weights=batch.mask.float()), WeightedNLL())
    found = difference(weights_of(backend), before)
    backend.shutdown()
    return found
