"""The batch of live rows that a generator keeps: rows join, draw one token each per turn, and leave when they end.

How logits come about is the decoder's business, how tokens are drawn the sampler's (``sampling``), when a row ends its
response's (``responses``).
"""

# R = live rows, V = vocabulary

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Protocol

import torch
from nemorl.media import Media, media_by_name
from nemorl.types import SamplingParams
from torch import Tensor

from nemorl_tensors.engines.responses import Response, Routes

COMPACT_WASTE_FRAC = 0.25
"""Ended rows leave once the steps spent on them exceed this fraction of the batch: moving rows costs about as much."""

REFILL_FRAC = 0.25
"""When not all queued rows have room, those that have join once they are at least this fraction of the live ones: each
time some join costs a forward pass of its own."""

Score = Callable[[Sequence[tuple[int, ...]], Mapping[int, Media]], list[tuple[float, ...]]]
"""Prompts, with the images and sounds in them, to the log-probs of their tokens, 0.0 for the first of each."""


class Decoder(Protocol):
    """Rows in a fixed order, each a prompt and the tokens fed since. Knows nothing of sampling and stopping."""

    joins: bool
    """Whether rows may be admitted while others decode."""
    notes_routes: bool
    """Set before a pass: what it computes goes to ``take_routes``."""

    def admit(self, prompts: Sequence[tuple[int, ...]], reserve_tokens: int, media: Mapping[int, Media]) -> Tensor:
        """Append rows that begin with ``prompts``; equal prompts are computed once.

        Args:
            prompts: Token ids, not empty.
            reserve_tokens: Steps to make room for, over all rows, the present ones included.
            media: Images and sounds in the prompts, by name; none where the model reads text alone.

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

    def take_routes(self) -> Sequence[Routes]:
        """[T, L, K] experts of the T tokens of each row that the last pass computed, the rows it was given in order.

        Asked of models with experts alone.
        """
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


class WithoutRoutes:
    """The routes interface of a :class:`Decoder` for models without experts."""

    notes_routes = False

    def take_routes(self) -> Sequence[Routes]:
        """There are none."""
        return ()


class WithoutTurns(WithoutRoutes):
    """The turns interface of a :class:`Decoder` that computes every prompt from its beginning."""

    def save_turns(self, rows: Mapping[int, tuple[int, ...]]) -> None:
        """Nothing is kept."""

    def drop_turns(self) -> None:
        """There are none."""

    turn_bytes = 0


class Sampler(Protocol):
    """Draws for rows in the decoder's order; ``sampling.RowSampler`` is one."""

    def add(self, params: Sequence[SamplingParams], seeds: Sequence[int], drawn: Sequence[int]) -> None:
        """Append rows, each with as many tokens of its response as were drawn before."""
        ...

    def keep(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; the rest are forgotten."""
        ...

    def sample(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """([R] int64 tokens, [R] float32 nats of each under ``softmax(logits / temperature)``)."""
        ...


@dataclass(frozen=True)
class BatchLimits:
    """Limits of the live rows."""

    rows: int
    cache_tokens: int
    """Token positions, room for every row's longest response included."""


@torch.inference_mode()
def decode_responses(responses: Iterable[Response], batch: RunningBatch) -> None:
    """Let every response grow until it ends. The batch is left empty, whatever happens."""
    batch.add(responses)
    try:
        while batch.is_busy:
            batch.step()
    finally:
        batch.clear()


class RunningBatch:
    """Rows that are being decoded. Others may be added, and some dropped, between two steps."""

    def __init__(
        self, build: Callable[[], Decoder], sampler: Sampler, limits: BatchLimits, score: Score, version: int = 0
    ) -> None:
        """
        Args:
            build: Makes the decoder when rows need it.
            sampler: Without rows.
            limits: What bounds the live rows.
            score: For requests that want log-probs of their prompts.
            version: Of the weights.
        """
        self._build, self._sampler, self._limits, self._score = build, sampler, limits, score
        self._version = version
        self._decoder: Decoder | None = None
        self._queue: deque[Response] = deque()
        self._live: list[Response] = []
        self._logits: Tensor | None = None
        """[R, V] of the live rows' next tokens; ``None``: nothing is computed of the live rows."""
        self._over = 0
        """Live rows that have ended."""
        self._wasted_row_steps = 0
        self._goes_on = False
        """A conversation may have another turn, among the rows since the batch was last empty."""

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._live)

    def add(self, rows: Iterable[Response]) -> None:
        """Queue rows behind those that wait."""
        # Rows of like length together waste little padding, and equal prompts side by side are computed once.
        rows = sorted(rows, key=lambda row: (len(row.prompt), row.prompt))
        self._queue.extend(rows)
        self._goes_on = self._goes_on or any(row.goes_on for row in rows)

    def drop(self, rows: Collection[Response]) -> None:
        """Forget rows, wherever they are."""
        for row in rows:
            row.error = CancelledError()
        self.release(rows)

    @torch.inference_mode()
    def release(self, rows: Collection[Response]) -> None:
        """Let go of rows, wherever they are. Another batch that they are added to lets them go on."""
        self._queue = deque(row for row in self._queue if row not in rows)
        self._keep(_survivors(self._live, rows))
        if not self.is_busy:
            self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget all rows, and the conversations unless one of the rows may go on."""
        self._queue.clear()
        self._live, self._logits, self._over, self._wasted_row_steps = [], None, 0, 0
        self._sampler.keep([])
        if self._decoder is not None:
            self._decoder.keep([])
            if not self._goes_on:
                self._decoder.drop_turns()
        self._goes_on = False

    @torch.inference_mode()
    def renew(self, version: int | None = None) -> None:
        """Drop the decoder and all that it keeps. What it had computed of live rows is computed by a new one.

        Args:
            version: Of the weights from now on; ``None``: they are the same.
        """
        self._keep(_survivors(self._live))
        self._decoder = self._logits = None
        self._version = self._version if version is None else version

    @property
    def turn_bytes(self) -> int:
        """Memory of what is kept of conversations."""
        return 0 if self._decoder is None else self._decoder.turn_bytes

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """One token for every live row, after queued ones have taken free places. Those that ended with it."""
        if self._decoder is None:
            self._decoder = self._build()
        failed = self._admit(self._decoder)
        if self._logits is None:
            return failed
        # Rows that have ended and are still here draw tokens that nobody reads.
        tokens, logprobs = self._sampler.sample(self._logits)
        ended = self._record(*_on_host(tokens, logprobs))
        # Ended rows leave before the forward pass, once their cost exceeds that of moving the others.
        self._over += len(ended)
        self._wasted_row_steps += self._over
        self._logits = None
        if self._over == len(self._live) or self._wasted_row_steps > COMPACT_WASTE_FRAC * len(self._live):
            order = _survivors(self._live)
            self._keep(order)
            tokens = tokens[order]
        if self._live:
            self._logits = self._step(self._decoder, tokens)
        elif not self._queue:
            self.clear()
        return ended + failed

    def _step(self, decoder: Decoder, tokens: Tensor) -> Tensor:
        decoder.notes_routes = any(row.sampling.routes for row in self._live)
        logits = decoder.step(tokens)
        if decoder.notes_routes:
            for row, routes in zip(self._live, decoder.take_routes(), strict=True):
                row.went(row.length - 1, routes)
        return logits

    def _begin(self, decoder: Decoder, rows: Sequence[Response], reserve_tokens: int) -> Tensor:
        decoder.notes_routes = any(row.sampling.routes for row in rows)
        logits = decoder.admit([row.so_far for row in rows], reserve_tokens, _media(rows))
        if decoder.notes_routes:
            for row, routes in zip(rows, decoder.take_routes(), strict=True):
                row.went(0, routes)
        return logits

    def _admit(self, decoder: Decoder) -> list[Response]:
        """Let rows join, and have logits for all that are live. Those that cannot join."""
        joining = self._joining(decoder)
        if self._live and self._logits is None:
            for row in self._live:
                row.use(self._version)
            self._logits = self._begin(decoder, self._live, self._reserve([]))
        failed = self._score_prompts([row for row in joining if row.sampling.prompt_logprobs and not row.token_ids])
        joining = [row for row in joining if row.error is None]
        if joining:
            for row in joining:
                row.begin()
                row.use(self._version)
            first = self._begin(decoder, joining, self._reserve(joining))
            self._logits = first if self._logits is None else torch.cat((self._logits, first))
            drawn = [len(row.token_ids) for row in joining]
            self._sampler.add([row.sampling for row in joining], [row.seed for row in joining], drawn)
            self._live += joining
        return failed

    def _joining(self, decoder: Decoder) -> list[Response]:
        """The rows to admit now, taken from the queue."""
        live, limits = self._live, self._limits
        if not self._queue or (live and not decoder.joins):
            return []
        columns = max((row.length for row in live), default=0)
        reserve = max((row.remaining for row in live), default=0)
        count = 0
        for row in self._queue:
            columns, reserve = max(columns, row.length), max(reserve, row.remaining)
            rows = len(live) + count + 1
            if rows > limits.rows or (rows > 1 and rows * (columns + reserve) > limits.cache_tokens):
                break
            count += 1
        if live and count < min(len(self._queue), REFILL_FRAC * len(live)):
            return []
        return [self._queue.popleft() for _ in range(count)]

    def _reserve(self, joining: Sequence[Response]) -> int:
        """Steps to make room for: what the longest response takes, and more where rows join others. So much later the
        cache must be aligned anew, which copies it."""
        rows = [*self._live, *joining]
        needed = max(row.remaining for row in rows)
        if not self._live:
            return needed
        columns = max(row.length for row in rows)
        return needed + max(0, min(needed, self._limits.cache_tokens // len(rows) - columns - needed))

    def _score_prompts(self, rows: list[Response]) -> list[Response]:
        """Give rows the log-probs of their prompts. All of them, where that fails: a model may not support it."""
        prompts = list(dict.fromkeys(row.prompt for row in rows))
        try:
            found = dict(zip(prompts, self._score(prompts, _media(rows)) if prompts else [], strict=True))
        except Exception as error:
            for row in rows:
                row.error = error
            return rows
        for row in rows:
            row.prompt_logprobs = found[row.prompt]
        return []

    def _record(self, tokens: list[int], logprobs: list[float]) -> list[Response]:
        """Give each row its token; the rows that ended with it."""
        ended = []
        for row, token, logprob in zip(self._live, tokens, logprobs, strict=True):
            if row.finish_reason is None and row.error is None:
                row.push(token, logprob)
                if row.is_over:
                    ended.append(row)
        return ended

    def _keep(self, order: Sequence[int]) -> None:
        """Only these live rows stay, in this order. What was computed of conversations among the others is saved."""
        self._over = self._wasted_row_steps = 0
        if len(order) == len(self._live):
            return
        if self._decoder is not None:
            finished = {i: row.computed for i, row in enumerate(self._live) if row.finish_reason and row.goes_on}
            self._decoder.save_turns(finished)
            self._decoder.keep(order)
        self._live = [self._live[row] for row in order]
        self._sampler.keep(order)
        if self._logits is not None:
            self._logits = self._logits[order] if order else None


def _media(rows: Iterable[Response]) -> dict[int, Media]:
    return media_by_name(item for row in rows for item in row.media)


def _on_host(tokens: Tensor, logprobs: Tensor) -> tuple[list[int], list[float]]:
    """Both of each row, in one copy: the host waits once per token, which is the floor where it decides who goes on."""
    both = torch.stack((tokens, logprobs.view(torch.int32).to(torch.int64))).cpu()
    return both[0].tolist(), both[1].to(torch.int32).view(torch.float32).tolist()


def _survivors(live: list[Response], leaving: Collection[Response] = ()) -> list[int]:
    """The rows that go on here, in an order that fills the holes with the last of them: few rows move."""
    stays = [not row.is_over and row not in leaving for row in live]
    count = sum(stays)
    movers = [index for index in range(count, len(live)) if stays[index]]
    return [index if stays[index] else movers.pop() for index in range(count)]
