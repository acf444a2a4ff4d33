"""A batch as plain numbers, row by row: what is drawn, shrunk and printed.

# N = tokens of all sequences concatenated, K = outputs of a token
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from nemorl_tensors import LossAggregation, TokenBatch
from torch import Tensor

Value = float | tuple[float, ...]
"""Of one token: a number, or several."""


@dataclass(frozen=True)
class Row:
    """One sequence. Slots that the mask leaves out hold 0, as backends fill them."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    outputs: tuple[Value, ...]
    """What the model says of each token."""
    tokens: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Token fields of the batch."""
    sequence: Mapping[str, float] = field(default_factory=dict)
    """Sequence fields of the batch."""

    def without(self, place: int) -> Row:
        """The row less one token."""

        def cut(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return values[:place] + values[place + 1 :]

        tokens = {name: cut(values) for name, values in self.tokens.items()}
        return Row(cut(self.token_ids), cut(self.mask), cut(self.outputs), tokens, self.sequence)


@dataclass(frozen=True)
class Case:
    """Rows that make a batch of one optimizer step."""

    rows: tuple[Row, ...]
    group: int = 1
    """``TokenBatch.sequences_per_group``"""
    aggregation: LossAggregation = "token"

    @property
    def groups(self) -> list[tuple[Row, ...]]:
        return [self.rows[start : start + self.group] for start in range(0, len(self.rows), self.group)]

    @property
    def outputs(self) -> Tensor:
        """[N] or [N, K] float32."""
        return torch.tensor(self.flat([row.outputs for row in self.rows]))

    @property
    def batch(self) -> TokenBatch:
        rows = self.rows
        batch = TokenBatch.from_sequences(
            [row.token_ids for row in rows],
            [row.mask for row in rows],
            loss_aggregation=self.aggregation,
            sequences_per_group=self.group,
        )
        tokens = {name: torch.tensor(self.flat([row.tokens[name] for row in rows])) for name in rows[0].tokens}
        sequences = {name: torch.tensor([row.sequence[name] for row in rows]) for name in rows[0].sequence}
        return batch.with_tokens(**tokens).with_sequences(**sequences)

    @staticmethod
    def flat(values: Sequence[Sequence[Value]]) -> list[Any]:
        """[N] values of all rows, as lists."""
        return [list(one) if isinstance(one, tuple) else one for one in itertools.chain.from_iterable(values)]
