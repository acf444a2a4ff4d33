"""The batch of live rows that a generator keeps: rows join, draw one token each per turn, and leave when they end.

How logits come about is the decoder's business, how tokens are drawn the sampler's (``sampling``), when a row ends its
response's (``responses``).
"""

# R = live rows, V = vocabulary

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from nemorl.errors import BackendError
from nemorl.types import SamplingParams
from torch import Tensor

from nemorl_tensors.engines.responses import Response

COMPACT_WASTE_FRAC = 0.25
"""Ended rows leave once the steps spent on them exceed this fraction of the batch: moving rows costs about as much."""

REFILL_FRAC = 0.25
"""Queued rows join when they are at least this fraction of the live ones: joining copies the whole cache."""


class Decoder(Protocol):
    """Rows in a fixed order, each a prompt and the tokens fed since. Knows nothing of sampling and stopping."""

    joins: bool
    """Whether rows may be admitted while others decode."""

    def admit(self, prompts: Sequence[tuple[int, ...]], reserve_tokens: int) -> Tensor:
        """Append rows that begin with ``prompts``; equal prompts are computed once.

        Args:
            prompts: Token ids, not empty.
            reserve_tokens: Steps to make room for, over all rows, the present ones included.

        Returns:
            [len(prompts), V] logits of the token after each prompt.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """[R] one token per row -> [R, V] logits of the next."""
        ...

    def keep(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; the rest are dropped. Empty: all are."""
        ...

    def save_turns(self, rows: Mapping[int, tuple[int, ...]]) -> None:
        """Keep what was computed of the tokens of these rows, until a prompt begins with them. It is no duty."""
        ...

    def drop_turns(self) -> None:
        """No conversation goes on."""
        ...

    @property
    def turn_bytes(self) -> int:
        """Memory of what is kept."""
        ...


class WithoutTurns:
    """What a :class:`Decoder` that computes every prompt from its beginning has to say of turns."""

    def save_turns(self, rows: Mapping[int, tuple[int, ...]]) -> None:
        """Nothing is kept."""

    def drop_turns(self) -> None:
        """There are none."""

    turn_bytes = 0


class Sampler(Protocol):
    """Draws for rows in the decoder's order; ``sampling.RowSampler`` is one."""

    def add(self, params: Sequence[SamplingParams], seeds: Sequence[int]) -> None:
        """Append rows at the start of their response."""
        ...

    def keep(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; the rest are forgotten."""
        ...

    def sample(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """([R] int64 tokens, [R] float32 nats of each under ``softmax(logits / temperature)``)."""
        ...


@dataclass(frozen=True)
class BatchLimits:
    """What bounds the live rows."""

    rows: int
    cache_tokens: int
    """Token positions, room for every row's longest response included."""


@torch.inference_mode()
def decode_responses(responses: Iterable[Response], decoder: Decoder, sampler: Sampler, limits: BatchLimits) -> None:
    """Let every response grow until it ends. The decoder is left without rows, whatever happens.

    Raises:
        BackendError: The model's logits are not finite.
    """
    # Rows of like length together waste little padding, and equal prompts side by side are computed once.
    queue = deque(sorted(responses, key=lambda row: (len(row.prompt), row.prompt)))
    goes_on = any(row.goes_on for row in queue)
    try:
        _decode(queue, decoder, sampler, limits)
    finally:
        decoder.keep([])
        if not goes_on:
            decoder.drop_turns()


def _decode(queue: deque[Response], decoder: Decoder, sampler: Sampler, limits: BatchLimits) -> None:
    live: list[Response] = []
    logits: Tensor | None = None
    wasted_row_steps = 0
    while queue or live:
        # 1. Queued rows take the places of those that have left.
        joining = _joining(live, queue, limits, while_live=decoder.joins)
        if joining:
            reserve = max(row.remaining for row in live + joining)
            first = decoder.admit([row.prompt for row in joining], reserve)
            logits = first if logits is None else torch.cat((logits, first))
            sampler.add([row.sampling for row in joining], [row.seed for row in joining])
            live += joining
        # 2. One token per row. Rows that have ended and are still here draw tokens that nobody reads.
        assert logits is not None, "there are live rows"
        tokens, logprobs = sampler.sample(logits)
        ended = _record(live, tokens.tolist(), logprobs.tolist())
        # 3. Ended rows leave before the forward pass, once their cost exceeds that of moving the others.
        wasted_row_steps += ended
        if ended == len(live) or wasted_row_steps > COMPACT_WASTE_FRAC * len(live):
            wasted_row_steps = 0
            decoder.save_turns({i: row.computed for i, row in enumerate(live) if row.finish_reason and row.goes_on})
            order = _survivors(live)
            live = [live[row] for row in order]
            decoder.keep(order)
            sampler.keep(order)
            tokens = tokens[order]
        logits = decoder.step(tokens) if live else None


def _joining(live: list[Response], queue: deque[Response], limits: BatchLimits, *, while_live: bool) -> list[Response]:
    """The rows to admit now, taken from the queue."""
    free = limits.rows - len(live)
    if not queue or (live and (not while_live or free < REFILL_FRAC * len(live))):
        return []
    columns = max((row.length for row in live), default=0)
    reserve = max((row.remaining for row in live), default=0)
    count = 0
    for row in queue:
        columns, reserve = max(columns, row.length), max(reserve, row.remaining)
        rows = len(live) + count + 1
        if count == free or (rows > 1 and rows * (columns + reserve) > limits.cache_tokens):
            break
        count += 1
    if live and count < REFILL_FRAC * len(live):
        return []
    return [queue.popleft() for _ in range(count)]


def _record(live: list[Response], tokens: list[int], logprobs: list[float]) -> int:
    """Give each row its token; how many of the rows have ended by now."""
    ended = 0
    for row, token, logprob in zip(live, tokens, logprobs, strict=True):
        if row.finish_reason is None:
            if math.isnan(logprob):
                raise BackendError(
                    f"the model's logits are not finite at token {len(row.token_ids)} of a response",
                    fix="the weights have diverged: lower the learning rate, or restart from an earlier checkpoint",
                )
            row.push(token, logprob)
        if row.finish_reason is not None:
            ended += 1
    return ended


def _survivors(live: list[Response]) -> list[int]:
    """The rows that go on, in an order that fills the holes with the last of them: few rows move."""
    going = [index for index, row in enumerate(live) if row.finish_reason is None]
    movers = [index for index in going if index >= len(going)]
    return [movers.pop() if live[index].finish_reason is not None else index for index in range(len(going))]
