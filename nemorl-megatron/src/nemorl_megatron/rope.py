"""Rotary position embeddings: frequencies as transformers computes them, in the shape that megatron-core asks for.

megatron-core has one table of frequencies with fixed constants of Llama 3; here they come from the model's config, and
sliding-window layers may have a table of their own (Gemma 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """megatron-core's rotary embedding with the model's own frequencies.

    Where there are two tables its angles are [2, S, 1, 1, head], full attention first; ``layers.LayerAttention`` takes
    the one of its layer.
    """

    def __init__(self, ropes: Sequence[Rope], head: int, device: str, group: ProcessGroup) -> None:
        super().__init__(head, 1.0, use_cpu_initialization=True, cp_group=group)
        self._tables = [rope.frequencies(head).to(device) for rope in ropes]

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: ProcessGroup | None = None
    ) -> Tensor:
        """Angles of a row's positions, of those that this context-parallel rank has: [S, 1, 1, head], or two of them.

        Args:
            max_seq_len: Tokens of the row over all context-parallel ranks.
            offset: Position of the first.
            packed_seq: The row holds many sequences; megatron-core then picks positions itself.
            cp_group: Context-parallel ranks; unset: those that it was built with.
        """
        group = cp_group or self.cp_group
        angles = [self._angles(table, max_seq_len, offset) for table in self._tables]
        if group.size() > 1 and not packed_seq:
            angles = [get_pos_emb_on_this_cp_rank(table, 0, group) for table in angles]
        return angles[0] if len(angles) == 1 else torch.stack(angles)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What turns a query or key by :func:`rotate`, for tokens that stand anywhere.

        Args:
            positions: [S, B], or what broadcasts to it.
            dtype: Of the queries and keys.

        Returns:
            Cosines and sines [S, B, 1, head], the sines of the first half negated; [2, S, B, 1, head] each where there
            are two tables.
        """
        found = []
        for table in self._tables:
            half = positions.to(table.dtype)[..., None, None] * table
            sines = half.sin()
            found.append((torch.cat((half.cos(),) * 2, -1).to(dtype), torch.cat((-sines, sines), -1).to(dtype)))
        if len(found) == 1:
            return found[0]
        cosines, signed_sines = zip(*found, strict=True)
        return torch.stack(cosines), torch.stack(signed_sines)

    def _angles(self, frequencies: Tensor, tokens: int, offset: int) -> Tensor:
        positions = torch.arange(offset, offset + tokens, device=frequencies.device, dtype=frequencies.dtype)
        half = torch.outer(positions, frequencies)
        return torch.cat((half, half), -1)[:, None, None, :]


def rotate(states: Tensor, cosines: Tensor, signed_sines: Tensor) -> Tensor:
    """Rotary embedding of [S, B, n, head], as megatron-core's with the minus sign moved into the table."""
    return torch.addcmul(states * cosines, torch.roll(states, states.shape[-1] // 2, -1), signed_sines)
