"""Prompts that several rows of a cache begin with: their keys and values are stored once, and read once per step.

A row's attention is over two parts: its prompt's keys, for all rows of that prompt in one product, and its own columns.
Each part is a softmax of its own; the log-sum-exp of its scores says which share of the whole it has.
"""

# L = layers, S = shared prompts, R = rows, H = key-value heads, G = query heads per key-value head, d = head size
# P = tokens of the longest shared prompt, W = most rows of one, B = problems (rows or prompts), M = queries of each

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MIN_SHARED_TOKENS = 24
"""Shorter prompts are cheaper as columns of their rows: a second part costs some twenty small operations a layer."""
NONE = -1
"""In place of a prompt's index: all that the row attends to are its own columns."""


class SharedPrompts:
    """Keys and values of prompts, and which rows begin with them. Of a row that begins with none it knows no more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Forget all rows and prompts."""
        self._of_row: list[int] = []
        self._lengths: list[int] = []
        self._keys = self._values = torch.empty(0)
        """[L, S, H, P, d] each"""
        self._derive()

    @property
    def is_empty(self) -> bool:
        """No row begins with a shared prompt."""
        return not self._lengths

    def tokens_of(self, row: int) -> int:
        """Tokens of the prompt that a row shares; 0 if it shares none."""
        return self._lengths[self._of_row[row]] if self._of_row[row] != NONE else 0

    def append(self, rows: int) -> None:
        """So many rows more, which share nothing yet."""
        self._of_row += [NONE] * rows
        if not self.is_empty:
            self._derive()

    def put(self, keys: Tensor, values: Tensor, lengths: Sequence[int], rows_of: Sequence[Sequence[int]]) -> None:
        """Prompts with their rows.

        Args:
            keys: [L, S', H, P', d] of the new prompts, padded at the end.
            values: Likewise.
            lengths: [S'] tokens of each.
            rows_of: [S'] the rows that begin with each.
        """
        known = len(self._lengths)
        self._keys, self._values = _joined(self._keys, keys), _joined(self._values, values)
        self._lengths += lengths
        for index, rows in enumerate(rows_of):
            for row in rows:
                self._of_row[row] = known + index
        self._derive()

    def keep(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was. Prompts without a row are dropped."""
        self._of_row = [self._of_row[row] for row in order]
        if self.is_empty:
            return
        live = sorted(set(self._of_row) - {NONE})
        if len(live) < len(self._lengths):
            self._lengths = [self._lengths[index] for index in live]
            longest = max(self._lengths, default=0)
            self._keys, self._values = (part[:, live, :, :longest] for part in (self._keys, self._values))
            places = {index: place for place, index in enumerate(live)}
            self._of_row = [places.get(index, NONE) for index in self._of_row]
        self._derive()

    def prompt(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, H, tokens, d] of what a row shares."""
        index, tokens = self._of_row[row], self.tokens_of(row)
        return self._keys[:, index, :, :tokens], self._values[:, index, :, :tokens]

    def attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """[R, H, G, d] attention of one new token per row over the shared prompts and the columns of the rows.

        Args:
            layer: Which of the prompts' keys and values.
            q: [R, H, G, d]
            keys: [R, H, T, d] of the rows' columns, the new token's included.
            values: Likewise.
            mask: [R, 1, 1, T] added to the scores of these, or ``None``.
            scale: Factor of the scores.
        """
        _, heads, groups, size = q.shape
        own, own_lse = _attend(q, keys, values, mask, scale)
        # All queries of a prompt's rows are those of one problem: [S, H, W * G, d].
        dealt = q[self._slots].view(-1, self._width, heads, groups, size).transpose(1, 2).flatten(2, 3)
        shared, shared_lse = _attend(dealt, self._keys[layer], self._values[layer], self._mask, scale)
        shared = shared.view(-1, heads, self._width, groups, size).transpose(1, 2).flatten(0, 1)[self._places]
        lse = shared_lse.reshape(-1, heads, self._width, groups).transpose(1, 2).flatten(0, 1)[self._places]
        if self._without is not None:
            lse = lse + self._without
        weight = torch.sigmoid(lse - own_lse).unsqueeze(-1)
        return torch.lerp(own.float(), shared.float(), weight).to(q.dtype)

    def _derive(self) -> None:
        """Derive the index tensors that attention needs."""
        rows_of: list[list[int]] = [[] for _ in self._lengths]
        for row, index in enumerate(self._of_row):
            if index != NONE:
                rows_of[index].append(row)
        self._width = max(map(len, rows_of), default=0)
        slots, places = [], [0] * len(self._of_row)
        for index, rows in enumerate(rows_of):
            for place, row in enumerate(rows):
                places[row] = index * self._width + place
            slots += rows + [0] * (self._width - len(rows))
        self._slots, self._places = (torch.tensor(found, device=self._device) for found in (slots, places))
        self._mask = self._without = None
        if any(tokens < self._keys.shape[3] for tokens in self._lengths):
            lengths = torch.tensor(self._lengths, device=self._device)
            past_end = torch.arange(self._keys.shape[3], device=self._device) >= lengths[:, None]
            self._mask = torch.zeros(past_end.shape, dtype=self._keys.dtype, device=self._device)
            self._mask = self._mask.masked_fill_(past_end, -torch.inf)[:, None, None]
        if NONE in self._of_row:
            alone = torch.tensor([index == NONE for index in self._of_row], device=self._device)
            self._without = torch.where(alone, -torch.inf, 0.0)[:, None, None]


def _joined(old: Tensor, new: Tensor) -> Tensor:
    """[L, S + S', H, max(P, P'), d]; what is past the end of the shorter ones is 0."""
    if not old.numel():
        return new
    width = max(old.shape[3], new.shape[3])
    padded = (torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[3])) for part in (old, new))
    return torch.cat(tuple(padded), 1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """([B, H, M, d] attention of queries over all keys, [B, H, M] float32 log of the sum of their exponentials)."""
    if q.dtype != torch.float32:
        # Scores in float32, and nothing of them in memory.
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return found
    count, heads, queries, _ = q.shape
    scores = torch.baddbmm(q.new_empty(1), q.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale)
    if mask is not None:
        scores.view(count, heads, queries, -1).add_(mask)
    probs = torch.softmax(scores, -1)
    # The largest probability is exp(largest score - lse).
    lse = scores.amax(-1) - probs.amax(-1).log_()
    out = torch.bmm(probs, values.flatten(0, 1))
    return out.view(count, heads, queries, -1), lse.view(count, heads, queries)
