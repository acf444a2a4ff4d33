"""Random batches as a peer's padded tensors and as ours, over the same logits: for tests against other systems' code.

# B = sequences, W = the longest, V = vocabulary, N = tokens of all sequences concatenated
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from nemorl_tensors import TokenBatch, pair_batch
from torch import Tensor

VOCABULARY = 11
IGNORED = -100
"""The label that peers give to what is not learnt."""


@dataclass(frozen=True)
class Padded:
    """Sequences of one prompt and one response each, padded at their ends."""

    prompts: list[list[int]]
    responses: list[list[int]]

    @property
    def sequences(self) -> list[list[int]]:
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def width(self) -> int:
        return max(map(len, self.sequences))

    @property
    def input_ids(self) -> Tensor:
        """[B, W]"""
        return torch.tensor([ids + [0] * (self.width - len(ids)) for ids in self.sequences])

    @property
    def attention_mask(self) -> Tensor:
        """[B, W] 1 at tokens, 0 at padding."""
        return torch.tensor([[1] * len(ids) + [0] * (self.width - len(ids)) for ids in self.sequences])

    @property
    def completion_mask(self) -> Tensor:
        """[B, W] 1 at the tokens of responses."""
        spans = zip(self.prompts, self.responses, strict=True)
        rows = [[0] * len(prompt) + [1] * len(response) for prompt, response in spans]
        return torch.tensor([row + [0] * (self.width - len(row)) for row in rows])

    @property
    def labels(self) -> Tensor:
        """[B, W] token ids of responses, -100 elsewhere."""
        return torch.where(self.completion_mask == 1, self.input_ids, IGNORED)

    @property
    def masked(self) -> list[tuple[list[int], list[bool]]]:
        """Token ids and mask of each sequence, as our batches are made of them."""
        spans = zip(self.prompts, self.responses, strict=True)
        return [(prompt + response, [False] * len(prompt) + [True] * len(response)) for prompt, response in spans]

    def logprobs(self, logits_BWV: Tensor) -> Tensor:
        """[N] of each token by the logits of the one before it; 0.0 for the first of a sequence."""
        parts = []
        for row, ids in enumerate(self.sequences):
            scores = torch.log_softmax(logits_BWV[row, : len(ids) - 1], -1)
            parts += [torch.zeros(1), scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]]
        return torch.cat(parts)


@dataclass(frozen=True)
class PaddedPairs:
    """Two responses to each of P prompts."""

    chosen: Padded
    rejected: Padded

    @property
    def collated(self) -> dict[str, Tensor]:
        """What TRL's collator makes of them."""
        return {
            f"{side}_{name}": getattr(part, name)
            for side, part in (("chosen", self.chosen), ("rejected", self.rejected))
            for name in ("input_ids", "attention_mask", "labels")
        }

    @property
    def batch(self) -> TokenBatch:
        return pair_batch(self.chosen.masked, self.rejected.masked)

    def logits(self, generator: torch.Generator) -> Tensor:
        """[2P, W, V] of the chosen ones, then of the rejected ones."""
        return drawn_logits(2 * len(self.chosen.prompts), max(self.chosen.width, self.rejected.width), generator)

    def logprobs(self, logits: Tensor) -> Tensor:
        """[N] of ``batch``, whose pairs stand side by side."""
        pairs = len(self.chosen.prompts)
        sides = zip((self.chosen, self.rejected), (logits[:pairs], logits[pairs:]), strict=True)
        cut = [torch.split(part.logprobs(found), [len(ids) for ids in part.sequences]) for part, found in sides]
        return torch.cat([side for pair in zip(*cut, strict=True) for side in pair])


def drawn_logits(count: int, width: int, generator: torch.Generator) -> Tensor:
    """[B, W, V] a leaf with gradient."""
    return torch.randn((count, width, VOCABULARY), generator=generator).requires_grad_()


def drawn_pairs(dice: random.Random) -> PaddedPairs:
    """One to five pairs."""
    count = dice.randint(1, 5)
    chosen = drawn(count, dice)
    return PaddedPairs(chosen, drawn(count, dice, prompts=chosen.prompts))


def assert_equal(ours: Tensor, theirs: Tensor, logits: Tensor) -> None:
    """Two losses of the same logits: values within 2e-6 and gradients within 5e-6."""
    (our_gradient,), (their_gradient,) = (torch.autograd.grad(loss, logits) for loss in (ours, theirs))
    assert abs(float(ours.detach()) - float(theirs.detach())) < 2e-6
    assert float((our_gradient - their_gradient).abs().max()) < 5e-6
    assert float(their_gradient.abs().max()) > 0


def drawn(count: int, dice: random.Random, *, prompts: list[list[int]] | None = None) -> Padded:
    """``count`` sequences with prompts of 1 to 4 tokens, those given where some are, and responses of 1 to 6."""

    def tokens(low: int, high: int) -> list[int]:
        return [dice.randrange(1, VOCABULARY) for _ in range(dice.randint(low, high))]

    return Padded(prompts or [tokens(1, 4) for _ in range(count)], [tokens(1, 6) for _ in range(count)])
