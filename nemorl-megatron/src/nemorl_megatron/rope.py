"""Rotary position embeddings: frequencies as transformers computes them, for tokens that stand anywhere.

megatron-core has one table of frequencies with fixed constants of Llama 3, and angles of rows that begin at position 0;
here frequencies come from the model's config, sliding-window layers may have a table of their own (Gemma 3), and every
token has its own position: rows may hold many sequences, parts of one, or only the newest token of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rope:
    """One table of frequencies."""

    theta: float
    """Base: the longest wavelength is about 2 pi theta tokens."""
    factor: float = 1.0
    """Positions are divided by this: all of them, or (``original_length`` set) those of long wavelengths."""
    low_frequency: float = 1.0
    high_frequency: float = 1.0
    """Turns within ``original_length`` below which a frequency is scaled in full, and above which it is not."""
    original_length: int | None = None
    """Tokens that the model was trained on before it was stretched (Llama 3.1)."""

    def frequencies(self, head: int) -> Tensor:
        """[head / 2] radians per token, float32."""
        plain = 1.0 / self.theta ** (torch.arange(0, head, 2, dtype=torch.int64).float() / head)
        if self.original_length is None:
            return plain / self.factor
        turns = self.original_length * plain / (2 * math.pi)
        # 0 where a frequency is scaled in full, 1 where it is not.
        kept = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


class Rotary(nn.Module):
    """Rotary embedding of queries and keys, from the model's own frequencies."""

    def __init__(self, ropes: Sequence[Rope], head: int, device: str) -> None:
        """
        Args:
            ropes: One table, or two: of full attention, then of sliding windows.
            head: Entries of an attention head that are turned.
            device: Of the model.
        """
        super().__init__()
        self._tables = [rope.frequencies(head).to(device) for rope in ropes]

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines and signed sines, for :func:`rotate`.

        Args:
            positions: [S, B] of tokens within their sequences, or what broadcasts to it.
            dtype: Of the queries and keys.

        Returns:
            [2, S, B, 1, head]: cosines, then sines with those of the first half negated. [2, 2, S, B, 1, head] where
            there are two tables, full attention first.
        """
        found = []
        for table in self._tables:
            half = positions.to(table.dtype)[..., None, None] * table
            sines = half.sin()
            found.append(torch.stack((torch.cat((half.cos(),) * 2, -1), torch.cat((-sines, sines), -1))).to(dtype))
        return found[0] if len(found) == 1 else torch.stack(found)


def rotate(states: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Rotary embedding of [S, B, n, head], as megatron-core's with the minus sign moved into the table. Entries beyond
    those of the table stay as they are."""
    turned = cosines.shape[-1]
    if turned < states.shape[-1]:
        return torch.cat((rotate(states[..., :turned], cosines, signed_sines), states[..., turned:]), -1)
    return torch.addcmul(states * cosines, torch.roll(states, states.shape[-1] // 2, -1), signed_sines)
