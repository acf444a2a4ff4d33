"""Keys and values of the rows that are being decoded, right-aligned in one preallocated block.

All rows write the same column at each step, so a step's write is one slice and attention reads one slice, however long
each row is. A row shorter than the longest has *pad* columns at its left, masked where any row has them. Rows leave by
moving the last rows into the holes (few copies); rows join by re-aligning the block. On request, a prompt that several
rows begin with is no column of theirs, but is kept once (``shared_prompts``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from nemorl.media import Media
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nemorl_tensors.engines.decoding import WithoutRoutes
from nemorl_tensors.engines.shared_prompts import MIN_SHARED_TOKENS, SharedPrompts
from nemorl_tensors.engines.turns import Turn, Turns

# L = layers, R = rows, H = key-value heads, G = query heads per key-value head, T = columns, d = head size
# U = distinct prompts, P = prompt tokens, W = last tokens of a row, V = vocabulary


Prompt = tuple[int, ...]
Prefill = Callable[[list[Prompt]], tuple[Tensor, Tensor, Tensor]]
"""Prompts to ([U, V] logits after each, their keys and values [L, U, H, P, d], padded at the end)."""

GoOn = Callable[[Tensor, "Recent"], Tensor]
"""Token ids [R, W], the last of each row, and where they belong, to [R, V] logits after them."""

PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Padded prompt tokens per forward pass: a CPU is fastest while the activations fit its cache."""


MASK_ALIGNMENT = 8
"""Columns. CUDA's attention reads a mask in vectors of 16 bytes: it copies one whose rows are no multiple of that
apart, and fails on one that begins between two."""


@dataclass(frozen=True)
class Recent:
    """The last W columns of some rows of a cache while their tokens are computed in one pass."""

    cache: KVCache
    rows: Tensor
    """[R]"""
    positions: Tensor
    """[R, W] of the tokens within their rows"""
    mask: Tensor
    """[R, 1, W, T] bool, True where a token sees a column"""
    is_new: Tensor
    """[R, 1, W, 1] bool, False where the cache has the token's keys and values"""

    def seen(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values [R, H, W, d] of new tokens; those of all columns up to them, [R, H, T, d]."""
        end, width = self.cache.length, keys.shape[2]
        found = []
        for block, newest in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
            all_columns = block[self.rows, :, :end]
            all_columns[:, :, end - width :] = torch.where(self.is_new, newest, all_columns[:, :, end - width :])
            block[self.rows, :, end - width : end] = all_columns[:, :, end - width :]
            found.append(all_columns)
        return found[0], found[1]


class KVCache:
    """A block of columns; ``length`` of them are written."""

    def __init__(
        self,
        layers: int,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shares_prompts: bool = False,
    ) -> None:
        """
        Args:
            layers: Of the model, or of this rank.
            heads: Key-value heads.
            head_size: Of each.
            dtype: Of keys and values.
            device: Where they are.
            shares_prompts: A prompt of several rows is kept once. Then :meth:`attend` is what attends.
        """
        self._layers, self._heads, self._head_size = layers, heads, head_size
        self._dtype, self._device = dtype, device
        self._shared, self._shares_prompts = SharedPrompts(device), shares_prompts
        self._pass_tokens = PREFILL_TOKENS.get(device.type, 2048)
        self.clear()

    def clear(self) -> None:
        """Forget all rows and release the memory."""
        self.keys = self._allocate(0, 0, transposed=False)
        """[L, R, H, T, d] with the strides of [L, R, H, d, T] in float32"""
        self.values = self._allocate(0, 0, transposed=False)
        """[L, R, H, T, d]"""
        self.length = 0
        self._shared.clear()
        self._set_pads([])

    @property
    def rows(self) -> int:
        return len(self._pads)

    def positions(self) -> int | Tensor:
        """Position of the next column in each row: one number where all agree, else [R]."""
        return self.length - self._start

    def append(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Open the next column: all layers' keys and values up to it ([L, R, H, t, d]) and the mask ([R, 1, 1, t])."""
        self.length += 1
        first, rows = self._first, self.rows
        keys = self.keys[:, :rows, :, first : self.length]
        values = self.values[:, :rows, :, first : self.length]
        return keys, values, None if self._mask is None else self._mask[..., first : self.length]

    def admit(
        self,
        prompts: Sequence[Prompt],
        reserve_tokens: int,
        prefill: Prefill,
        go_on: GoOn,
        turns: Turns,
    ) -> Tensor:
        """Append rows that begin with ``prompts``, each distinct one computed once, and make room for steps after them.

        Args:
            prompts: Token ids of each row.
            reserve_tokens: Steps to make room for.
            prefill: Computes whole prompts.
            go_on: Computes what is new of prompts that begin with a turn.
            turns: Those that are there; what goes on leaves them.

        Returns:
            [len(prompts), V] what ``prefill`` or ``go_on`` said after each.
        """
        first_row = self.rows
        before = {prompt: turn for prompt in dict.fromkeys(prompts) if (turn := turns.before(prompt))}
        rows_of: dict[Prompt, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(prompt, []).append(row)
        shared = {prompt for prompt in rows_of if prompt not in before and self._is_shared(prompt, rows_of[prompt])}
        alone = {prompt for prompt in rows_of if prompt not in before and prompt not in shared}
        self.extend([0 if prompt in shared else len(prompt) for prompt in prompts], reserve_tokens)
        parts = self._prefilled_once(first_row, {p: rows for p, rows in rows_of.items() if p in shared}, prefill)
        parts += self._prefilled(first_row, {p: rows for p, rows in rows_of.items() if p in alone}, prefill)
        parts += self._gone_on(first_row, {p: rows_of[p] for p in before}, before, go_on)
        for turn in before.values():
            turns.drop(turn)
        logits = parts[0][1].new_empty(len(prompts), parts[0][1].shape[1])
        for rows, found in parts:
            logits[rows] = found
        return logits

    def _is_shared(self, prompt: Prompt, rows: Sequence[int]) -> bool:
        return self._shares_prompts and len(rows) > 1 and len(prompt) >= MIN_SHARED_TOKENS

    def _prefilled_once(
        self, first_row: int, rows_of: dict[Prompt, list[int]], prefill: Prefill
    ) -> list[tuple[list[int], Tensor]]:
        """As :meth:`_prefilled`, of prompts that are kept once."""
        parts: list[tuple[list[int], Tensor]] = []
        for batch in _prefill_batches(list(rows_of), self._pass_tokens):
            logits_UV, keys, values = prefill(batch)
            lengths = [len(prompt) for prompt in batch]
            self._shared.put(keys, values, lengths, [[first_row + row for row in rows_of[p]] for p in batch])
            sources = [(index, row) for index, prompt in enumerate(batch) for row in rows_of[prompt]]
            parts.append(([row for _, row in sources], logits_UV[[index for index, _ in sources]]))
        self._set_pads(self._pads)
        return parts

    def _prefilled(
        self, first_row: int, rows_of: dict[Prompt, list[int]], prefill: Prefill
    ) -> list[tuple[list[int], Tensor]]:
        """Rows, counted from ``first_row``, and the logits after their prompts, which are computed whole."""
        parts: list[tuple[list[int], Tensor]] = []
        for batch in _prefill_batches(list(rows_of), self._pass_tokens):
            logits_UV, keys, values = prefill(batch)
            for size, same in groupby(range(len(batch)), key=lambda index: len(batch[index])):
                sources = [(index, row) for index in same for row in rows_of[batch[index]]]
                picked, rows = [index for index, _ in sources], [row for _, row in sources]
                self.write([first_row + row for row in rows], keys[:, picked, :, :size], values[:, picked, :, :size])
                parts.append((rows, logits_UV[picked]))
        return parts

    def _gone_on(
        self, first_row: int, rows_of: dict[Prompt, list[int]], before: Mapping[Prompt, Turn], go_on: GoOn
    ) -> list[tuple[list[int], Tensor]]:
        """The same of prompts that begin with a turn, whose new tokens alone are computed."""
        new_of = {prompt: len(prompt) - len(before[prompt].tokens) for prompt in rows_of}
        for prompt, rows in rows_of.items():
            turn, end = before[prompt], self.length - new_of[prompt]
            for row in rows:
                self.keys[:, first_row + row, :, end - len(turn.tokens) : end] = turn.keys
                self.values[:, first_row + row, :, end - len(turn.tokens) : end] = turn.values
        parts: list[tuple[list[int], Tensor]] = []
        queue = sorted(((new_of[prompt], row, prompt) for prompt, rows in rows_of.items() for row in rows))
        while queue:
            count = 1
            while count < len(queue) and (count + 1) * queue[count][0] <= self._pass_tokens:
                count += 1
            batch, queue = queue[:count], queue[count:]
            width = batch[-1][0]
            # Rows with less to say repeat some of what they said: all are of one width.
            ids = [[*[0] * (width - len(prompt)), *prompt[-width:]] for _, _, prompt in batch]
            recent = self._recent([first_row + row for _, row, _ in batch], [new for new, _, _ in batch], width)
            parts.append(([row for _, row, _ in batch], go_on(torch.tensor(ids, device=self._device), recent)))
        return parts

    def _recent(self, rows: Sequence[int], new: Sequence[int], width: int) -> Recent:
        device = self._device
        columns = torch.arange(self.length, device=device)
        pads_R1 = torch.tensor([self._pads[row] for row in rows], device=device).unsqueeze(1)
        queries = columns[-width:]
        # A pad sees itself: a softmax over nothing is NaN.
        seen_RWT = (columns <= queries[:, None]) & ((columns >= pads_R1)[:, None] | (columns == queries[:, None]))
        return Recent(
            self,
            torch.tensor(rows, device=device),
            (queries - pads_R1).clamp(min=0),
            seen_RWT[:, None],
            (queries >= self.length - torch.tensor(new, device=device).unsqueeze(1))[:, None, :, None],
        )

    def turn(self, row: int, tokens: Prompt) -> Turn:
        """A copy of what is there of a row that begins with ``tokens``."""
        shared = self._shared.tokens_of(row)
        span = slice(self._pads[row], self._pads[row] + len(tokens) - shared)
        own = self.keys[:, row, :, span], self.values[:, row, :, span]
        if not shared:
            return Turn(tokens, own[0].clone(), own[1].clone())
        before = self._shared.prompt(row)
        return Turn(tokens, torch.cat((before[0], own[0]), 2), torch.cat((before[1], own[1]), 2))

    def attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """[R, H * G * d] attention of a new token per row: queries [R, H, G, d], a layer of what ``append`` gave."""
        rows, heads, groups, size = q.shape
        if self._shared.is_empty:
            return attend_newest(q.reshape(rows * heads, groups, size), keys, values, mask, scale).reshape(rows, -1)
        return self._shared.attend(layer, q, keys, values, mask, scale).flatten(1)

    def extend(self, prompt_tokens: Sequence[int], reserve_tokens: int) -> None:
        """Make room for rows with prompts of these lengths, whose ``write`` is to follow, and for steps after them.

        Where the block has room already, nothing that is in it moves.
        """
        self._shared.append(len(prompt_tokens))
        rows, columns = self.rows + len(prompt_tokens), self.length + reserve_tokens
        has_room = self.keys.shape[1] >= rows and self.keys.shape[3] >= columns and self.length >= max(prompt_tokens)
        if self.rows and has_room:
            for block in (self.keys, self.values):
                block[:, self.rows : rows, :, : self.length].zero_()  # a masked NaN is still a NaN
            self._set_pads([*self._pads, *(self.length - count for count in prompt_tokens)])
            return
        old_keys, old_values, old_rows = self.keys, self.values, self.rows
        longest = self.length - self._first
        length = max(longest, *prompt_tokens)
        rows, columns = old_rows + len(prompt_tokens), length + reserve_tokens
        # In float32 scores are a matrix product, which reads keys faster along T; fused attention wants them along d.
        self.keys = self._allocate(rows, columns, transposed=self._dtype == torch.float32)
        self.values = self._allocate(rows, columns, transposed=False)
        pads = [pad + length - self.length for pad in self._pads] + [length - count for count in prompt_tokens]
        for new, old in ((self.keys, old_keys), (self.values, old_values)):
            if any(pads):
                new[:, :, :, :length].zero_()
            if old_rows:
                new[:, :old_rows, :, length - longest : length] = old[:, :old_rows, :, self._first : self.length]
        self.length = length
        self._set_pads(pads)

    def write(self, rows: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Store the prompt of ``rows``: [L, len(rows) or 1, H, prompt tokens, d]."""
        index = torch.tensor(rows, device=self._device)
        start = self.length - keys.shape[3]
        self.keys[:, index, :, start : self.length] = keys
        self.values[:, index, :, start : self.length] = values

    def keep(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was. No row may move to the right."""
        moves = [(target, source) for target, source in enumerate(order) if target != source]
        if moves:
            targets, sources = torch.tensor(moves, device=self._device).unbind(1)
            for block in (self.keys, self.values):
                live = block[:, :, :, self._first : self.length]
                live[:, targets] = live[:, sources]
        self._shared.keep(order)
        self._set_pads([self._pads[row] for row in order])

    def _allocate(self, rows: int, columns: int, *, transposed: bool) -> Tensor:
        sizes = (self._head_size, columns) if transposed else (columns, self._head_size)
        block = torch.empty(self._layers, rows, self._heads, *sizes, dtype=self._dtype, device=self._device)
        return block.transpose(-1, -2) if transposed else block

    def _set_pads(self, pads: list[int]) -> None:
        self._pads = pads
        self._first = min(pads, default=0)
        self._mask: Tensor | None = None
        starts = [pad - self._shared.tokens_of(row) for row, pad in enumerate(pads)]
        self._start: int | Tensor = (
            torch.tensor(starts, device=self._device) if len(set(starts)) > 1 else sum(starts[:1])
        )
        """Column that position 0 would be in: of all rows, or [R]"""
        if len(set(pads)) > 1:
            self._first -= self._first % MASK_ALIGNMENT
            columns = -(-self.keys.shape[3] // MASK_ALIGNMENT) * MASK_ALIGNMENT
            pads_R1 = torch.tensor(pads, device=self._device).unsqueeze(1)
            hidden = torch.arange(columns, device=self._device) < pads_R1
            self._mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            self._mask = self._mask.masked_fill_(hidden, float("-inf"))[:, None, None]


def attend_newest(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float | None = None
) -> Tensor:
    """Attention of one new token per row over the cached ones, its own included.

    Args:
        q: [R * H, G, d]
        keys: [R, H, T, d]
        values: [R, H, T, d]
        mask: [R, 1, 1, T] added to the scores, or ``None``.
        scale: Factor of the scores.
        cap: Scores s become cap * tanh(s / cap).

    Returns:
        As many elements as ``q`` has, in its order.
    """
    rows, kv_heads, columns, size = values.shape
    groups = q.shape[1]
    if q.dtype != torch.float32 and cap is None:
        # Fused attention keeps the scores in float32.
        q = q.view(rows, kv_heads, groups, size)
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    scores = torch.baddbmm(q.new_empty(1), q, keys.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores.view(rows, kv_heads, groups, columns).add_(mask)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), values.flatten(0, 1))


def _prefill_batches(prompts: list[Prompt], budget_tokens: int) -> Iterator[list[Prompt]]:
    """Prompts by length, in batches of at most ``budget_tokens`` padded tokens (or one prompt)."""
    batch: list[Prompt] = []
    for prompt in sorted(prompts, key=len):
        if batch and (len(batch) + 1) * len(prompt) > budget_tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


class CachedRows(WithoutRoutes, ABC):
    """A ``decoding.Decoder`` but for the model's passes."""

    joins = True

    def __init__(self, cache: KVCache, turns: Turns) -> None:
        self._cache, self._turns = cache, turns

    @abstractmethod
    def _prefill(self, prompts: list[Prompt]) -> tuple[Tensor, Tensor, Tensor]:
        """As ``kv_cache.Prefill``."""

    @abstractmethod
    def _go_on(self, ids: Tensor, recent: Recent) -> Tensor:
        """As ``kv_cache.GoOn``."""

    def admit(self, prompts: Sequence[Prompt], reserve_tokens: int, media: Mapping[int, Media]) -> Tensor:
        return self._cache.admit(prompts, reserve_tokens, self._prefill, self._go_on, self._turns)

    def keep(self, order: Sequence[int]) -> None:
        if order:
            self._cache.keep(order)
        else:
            self._cache.clear()

    def save_turns(self, rows: Mapping[int, Prompt]) -> None:
        for row, tokens in rows.items():
            self._turns.put(self._cache.turn(row, tokens))

    def drop_turns(self) -> None:
        self._turns.clear()

    @property
    def turn_bytes(self) -> int:
        return self._turns.nbytes
