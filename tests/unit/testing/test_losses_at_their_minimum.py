"""A loss that is at its minimum has no gradient, and yet teaches every token: the kit does not take it for a defect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch, segment_sum
from nemorl_testing.trained_tokens import tokens_without_gradient
from nemorl_testing.updates import Update
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

BATCH = TokenBatch.from_sequences([[5, 6, 7], [5, 8]], [[False, True, True], [False, True]])
SAID = torch.tensor([0.0, -1.0, -2.0, 0.0, -1.0])


@dataclass(frozen=True)
class OutcomeLoss:
    """Cross entropy of a half and of sigmoid(sum of log-ratios): at its minimum where nothing has moved yet."""

    taught: Callable[[Tensor], Tensor] = lambda ratios: ratios
    requires: ClassVar[frozenset[str]] = frozenset({"reference_logprobs"})

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        ratios = self.taught(torch.where(batch.mask, logprobs - batch["reference_logprobs"], 0.0))
        judged_B = segment_sum(ratios, batch.mask, batch.lengths)
        losses_B = binary_cross_entropy_with_logits(judged_B, torch.full_like(judged_B, 0.5), reduction="none")
        return (losses_B * segment_sum(batch.loss_weights, batch.mask, batch.lengths)).sum(), {}


def without_gradient(loss: OutcomeLoss) -> list[int]:
    batch = BATCH.with_tokens(reference_logprobs=SAID)
    return tokens_without_gradient(Update("judge", "language_model", batch, loss, SAID)).nonzero().flatten().tolist()


def test_a_loss_at_its_minimum_teaches_all_the_same() -> None:
    assert without_gradient(OutcomeLoss()) == []


def test_a_token_that_is_left_out_is_found_there_too() -> None:
    last = torch.tensor([True, True, False, True, True])
    assert without_gradient(OutcomeLoss(lambda ratios: torch.where(last, ratios, 0.0))) == [2]
