"""Checks of training backends that know the whole distribution at each token (capability ``moments``).

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from nemorl.contracts import MomentsBackend
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch
from nemorl_tensors.filtering import TokenFilter
from torch import Tensor

from nemorl_testing.backends import build_trainer, expect_close, model_folder, reference
from nemorl_testing.batches import ragged_batch
from nemorl_testing.kit import NotApplicable, Subject, expect
from nemorl_testing.training_outputs import vocabulary_logprobs


@dataclass(frozen=True)
class Unsure:
    """loss = -sum(loss_weights * entropy)"""

    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return -(torch.where(batch.mask, outputs[:, 1], 0.0) * batch.loss_weights).sum(), {}


def check_moments_are_those_of_transformers(subject: Subject) -> None:
    """get_moments gives log-probs, entropies and sums of squared probabilities of the whole vocabulary. (DESIGN 5)"""
    _require(subject)
    batch = ragged_batch(temperature=0.7)
    found = cast(MomentsBackend, build_trainer(subject)).get_moments(batch).cpu()
    expect(tuple(found.shape) == (batch.num_tokens, 3), f"the shape is {tuple(found.shape)}, not [N, 3]")
    expect(not found[~batch.mask].any(), "masked-out tokens are not zero")
    plain = vocabulary_logprobs(reference(model_folder(subject)), batch)
    named = plain.gather(1, batch.token_ids[:, None])[:, 0]
    wanted = torch.stack((named, -(plain.exp() * plain).sum(1), plain.exp().square().sum(1)), 1)
    expect_close(found[batch.mask], wanted[batch.mask], subject.settings.tolerance, "a log-prob or moment")


def check_an_entropy_bonus_raises_the_entropy(subject: Subject) -> None:
    """A batch that asks for moments gives its loss [N, 3], with the gradient of the entropies. (DESIGN 7.4)"""
    _require(subject)
    batch = replace(ragged_batch(), keep=TokenFilter(beside_moments=True))
    backend = build_trainer(subject, optimizer={"lr": 1e-2, "weight_decay": 0.0})
    seen = []
    for _ in range(4):
        seen.append(float(cast(MomentsBackend, backend).get_moments(batch)[:, 1].sum()))
        backend.train_step(batch, Unsure())
    expect(seen[-1] > seen[0], f"three steps that reward entropy took it from {seen[0]} to {seen[-1]}")


def _require(subject: Subject) -> None:
    if "moments" not in subject.config.supports:
        raise NotApplicable("the backend does not declare supports={'moments'}")
