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
    amplitude: float = 1.0
    """Of cosines and sines: attention scores grow by its square."""

    def frequencies(self, head: int) -> Tensor:
        """[head / 2] radians per token, float32."""
        plain = 1.0 / self.theta ** (torch.arange(0, head, 2, dtype=torch.int64).float() / head)
        if self.original_length is None:
            return plain / self.factor
        turns = self.original_length * plain / (2 * math.pi)
        # 0 where a frequency is scaled in full, 1 where it is not.
        kept = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


@dataclass(frozen=True)
class Yarn(Rope):
    """A table stretched as YaRN does it (arXiv:2309.00071, sec. 3.2): between two frequencies, given by their turns
    within ``original_length``, the share that is scaled rises evenly with the number of the frequency."""

    truncated: bool = True
    """The two are whole numbers, rounded outwards."""

    @staticmethod
    def usual_amplitude(factor: float, weight: float = 1.0) -> float:
        """That of the paper, eq. 22: 0.1 ln(factor) + 1, the logarithm weighted as DeepSeek's configs ask for."""
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    def frequencies(self, head: int) -> Tensor:
        assert self.original_length is not None, "a stretched table is stretched from something"
        plain = 1.0 / self.theta ** (torch.arange(0, head, 2, dtype=torch.int64).float() / head)
        first, last = (self._number(turns, head) for turns in (self.high_frequency, self.low_frequency))
        if self.truncated:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head - 1)
        # transformers parts two equal numbers by this much, so that nothing divides by zero.
        width = last - first or 0.001
        scaled = ((torch.arange(head // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        return scaled * plain / self.factor + (1 - scaled) * plain

    def _number(self, turns: float, head: int) -> float:
        """Of the frequency with so many turns within ``original_length``, counted from 0."""
        assert self.original_length is not None, "a stretched table is stretched from something"
        return head * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


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
        self._amplitudes = [rope.amplitude for rope in ropes]

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
        for table, amplitude in zip(self._tables, self._amplitudes, strict=True):
            half = positions.to(table.dtype)[..., None, None] * table
            cosines, sines = half.cos() * amplitude, half.sin() * amplitude
            found.append(torch.stack((torch.cat((cosines,) * 2, -1), torch.cat((-sines, sines), -1))).to(dtype))
        return found[0] if len(found) == 1 else torch.stack(found)


def rotate(states: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Rotary embedding of [S, B, n, head], as megatron-core's with the minus sign moved into the table. Entries beyond
    those of the table stay as they are."""
    turned = cosines.shape[-1]
    if turned < states.shape[-1]:
        return torch.cat((rotate(states[..., :turned], cosines, signed_sines), states[..., turned:]), -1)
    return torch.addcmul(states * cosines, torch.roll(states, states.shape[-1] // 2, -1), signed_sines)
