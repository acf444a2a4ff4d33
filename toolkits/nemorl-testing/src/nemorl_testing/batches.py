"""Ragged batches with known lengths, and probe losses that show what a backend does with them.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Max, Metrics, Sum
from nemorl_tensors import TokenBatch, masked_mean, segment_sum
from torch import Tensor

LENGTHS = (5, 17, 9, 33, 3, 12, 20, 8, 1)
"""Tokens of each sequence: 108 in all. 5 and 6 are trained on in part, 7 not at all, 8 has nothing to score."""
FIRST_TEXT_TOKEN = 8
"""Smaller ids are special tokens of the tiny model."""


def ragged_batch(*, temperature: float = 1.0, vocabulary: int = 80, seed: int = 0) -> TokenBatch:
    """Nine sequences with ``advantages`` in [-1, 1]."""
    draw = random.Random(seed)
    ids = [[draw.randrange(FIRST_TEXT_TOKEN, vocabulary) for _ in range(length)] for length in LENGTHS]
    masks = [[True] * length for length in LENGTHS]
    masks[5] = [False] * 6 + [True] * 3 + [False] * 3
    masks[6] = [index % 3 == 0 for index in range(20)]
    masks[7] = [False] * 8
    batch = TokenBatch.from_sequences(ids, masks, temperature=temperature)
    return batch.with_tokens(advantages=torch.tensor([draw.uniform(-1, 1) for _ in range(batch.num_tokens)]))


def branching_batch(*, temperature: float = 1.0, vocabulary: int = 80, seed: int = 3) -> TokenBatch:
    """Sequences that share tokens, out of order, with ``advantages`` in [-1, 1].

    Three groups of four on prompts of 9, 30 and 10 tokens, of which two share a first turn; one of these again with
    another mask, and again as it is; the beginning of another; and one that shares nothing.
    """
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(FIRST_TEXT_TOKEN, vocabulary) for _ in range(count)]

    ids, masks = [], []
    for prompt_tokens in (9, 30, 10):
        prompt, turn = tokens(prompt_tokens), tokens(4)
        for index in range(4):
            answer = [*turn, *tokens(3)] if index < 2 else tokens(6)
            ids.append([*prompt, *answer])
            masks.append([False] * prompt_tokens + [True] * len(answer))
    ids += [ids[0], ids[0], ids[5][:33], tokens(7)]
    masks += [[index % 2 == 0 for index in range(len(ids[0]))], masks[0], masks[5][:33], [True] * 7]
    order = list(range(len(ids)))
    draw.shuffle(order)
    batch = TokenBatch.from_sequences([ids[i] for i in order], [masks[i] for i in order], temperature=temperature)
    return batch.with_tokens(advantages=torch.tensor([draw.uniform(-1, 1) for _ in range(batch.num_tokens)]))


@dataclass(frozen=True)
class WeightedNLL:
    """loss = -sum(loss_weights * advantages * policy_logprobs): the gradient of every trained token matters."""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        per_token = torch.where(batch.mask, -policy_logprobs * batch["advantages"], 0.0)
        return (per_token * batch.loss_weights).sum(), {}


@dataclass(frozen=True)
class Counted(WeightedNLL):
    """The same with metrics of all trained tokens: how many, and their mean log-prob."""

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        loss, _ = super().__call__(policy_logprobs, batch)
        seen: Metrics = {"seen": Sum(float(batch.mask.sum())), "logprob": masked_mean(policy_logprobs, batch.mask)}
        return loss, seen


@dataclass(frozen=True)
class Selective(Counted):
    """The same, which says that sequences without an advantage give no gradient."""

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return segment_sum((batch["advantages"] != 0).float(), batch.mask, batch.lengths) > 0


@dataclass(frozen=True)
class RatioProbe:
    """Reports how far the ratio policy / old is from 1 at most."""

    requires: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        log_ratio = torch.where(batch.mask, policy_logprobs - batch["old_logprobs"], 0.0)
        error = torch.expm1(log_ratio.detach()).abs().max() if log_ratio.numel() else torch.zeros(())
        return (log_ratio * batch.loss_weights).sum(), {"ratio_error": Max(float(error))}


@dataclass(frozen=True)
class Demanding:
    """Declares a field that no batch has, and does not read it: only the declaration can reveal the mistake."""

    requires: ClassVar[frozenset[str]] = frozenset({"a_field_nobody_made"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return (policy_logprobs * batch.loss_weights).sum(), {}


@dataclass(frozen=True)
class NotFinite:
    """A loss that has diverged."""

    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return policy_logprobs.sum() * torch.nan, {}
