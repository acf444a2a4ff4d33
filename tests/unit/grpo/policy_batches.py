"""The random batches on which losses are compared with those of other systems, and how what these said was recorded.

A batch is S responses of up to T tokens, padded, as the other systems have them; ``ragged`` is the same as a
``TokenBatch``. Numbers come from Python's generator, which is the same on every machine.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from nemorl_tensors import LossAggregation, TokenBatch
from torch import Tensor

RECORD = Path(__file__).with_name("peer_losses.json")
BATCHES = 50
RESPONSES, LONGEST = 4, 5


@dataclass(frozen=True)
class PeerBatch:
    """[S, T] of log-probs and the like, [S, T] mask, [S] advantages, rewards and groups."""

    mask: Tensor
    policy: Tensor
    old: Tensor
    generation: Tensor
    reference: Tensor
    advantages: Tensor
    rewards: Tensor
    groups: tuple[int, ...]
    entropies: Tensor
    collisions: Tensor
    """Sum of the squared probabilities of all tokens"""

    def flat(self, padded: Tensor) -> Tensor:
        """[S, T] -> [N]: a prompt token, then the response, sequence by sequence."""
        rows = zip(padded, self.mask, strict=True)
        return torch.cat([torch.cat([torch.zeros(1), row[mask.bool()]]) for row, mask in rows])

    def trained(self, flat: Tensor) -> list[float]:
        """[N] -> the trained tokens."""
        found: list[float] = flat[self.flat(self.mask.float()).bool()].tolist()
        return found

    def ragged(self, level: LossAggregation = "token") -> TokenBatch:
        lengths = self.mask.sum(1).tolist()
        ids, masks = [[5] * (n + 1) for n in lengths], [[False] + [True] * n for n in lengths]
        batch = TokenBatch.from_sequences(ids, masks, loss_aggregation=level)
        return batch.with_tokens(
            advantages=self.flat(self.advantages[:, None].expand(self.mask.shape)),
            old_logprobs=self.flat(self.old),
            generation_logprobs=self.flat(self.generation),
            reference_logprobs=self.flat(self.reference),
        )


def peer_batch(number: int) -> PeerBatch:
    """The batch of this number."""
    draw = random.Random(number)

    def table(one: Any) -> Tensor:
        return torch.tensor([[one() for _ in range(LONGEST)] for _ in range(RESPONSES)])

    lengths = [draw.randint(1, LONGEST) for _ in range(RESPONSES)]
    policy = table(lambda: -draw.expovariate(1.0) - 0.01)
    rewards = torch.tensor([draw.choice([0.0, 1.0, 0.5]) for _ in range(RESPONSES)])
    return PeerBatch(
        mask=torch.tensor([[int(t < n) for t in range(LONGEST)] for n in lengths]),
        policy=policy,
        old=(policy + table(lambda: draw.gauss(0, 0.4))).clamp(max=-0.001),
        generation=(policy + table(lambda: draw.gauss(0, 0.6))).clamp(max=-0.001),
        reference=(policy + table(lambda: draw.gauss(0, 0.8))).clamp(max=-0.001),
        advantages=torch.tensor([draw.gauss(0, 1) for _ in range(RESPONSES)]),
        rewards=rewards,
        groups=(0, 0, 1, 1) if draw.random() < 0.5 else (0, 0, 0, 1),
        entropies=table(lambda: draw.uniform(0, 3)),
        collisions=table(lambda: draw.uniform(0.1, 1)),
    )


@cache
def recorded() -> dict[str, Any]:
    """What the other systems computed: case -> source, commit, path, function, and numbers by batch."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found
