"""Responses while they grow: their tokens, and when they end. Plain Python on the host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy
from nemorl.base.process.timing import Span, Timed
from nemorl.errors import BackendError
from nemorl.media import Media, is_media, media_by_name, shown_names, text_ids
from nemorl.types import Completion, FinishReason, GenerationRequest, SamplingParams
from numpy.typing import NDArray

from nemorl_tensors.numbers import logprobs, token_ids

Decode = Callable[[Sequence[int]], str]
Routes = NDArray[numpy.int16]
"""[T, L, K] experts of tokens, as ``Completion.routes``"""

UNFINISHED_CHARACTER = "�"
"""Text that byte-level tokenizers decode part of a multi-byte character to."""

MAX_PENDING_TOKENS = 16
"""After this many tokens without a whole character, the text is taken as it is."""


@dataclass(frozen=True, slots=True)
class TimedCompletion(Completion, Timed):
    """A completion whose engine says when it was made. Equal tokens are equal, whenever they came."""

    span: Span = field(default=Span(0.0, 0.0), compare=False)
    """Since the engine was given the request: when it had a place, and when its last token was drawn."""


class StopStringMatcher:
    """Finds stop strings in text that arrives token by token.

    A token alone may decode differently than in context (leading spaces, multi-byte characters), so each step decodes
    a short window: ``text(window) - text(window without the pending tokens)`` is what the pending tokens add.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        self._kept_characters = max(map(len, strings)) - 1
        self._window: list[int] = []
        self._known_tokens = 0
        """Tokens of the window whose text has been searched."""
        self._tail = ""

    def push(self, token: int) -> bool:
        """Whether the response contains a stop string now."""
        self._window.append(token)
        known = self._decode(self._window[: self._known_tokens])
        text = self._decode(self._window)
        pending = len(self._window) - self._known_tokens
        if text.endswith(UNFINISHED_CHARACTER) and pending < MAX_PENDING_TOKENS:
            return False
        searched = self._tail + text[len(known) :]
        self._tail = searched[max(0, len(searched) - self._kept_characters) :]
        self._window, self._known_tokens = self._window[self._known_tokens :], pending
        return any(string in searched for string in self._strings)


class Response:
    """One sample of one request."""

    __slots__ = (
        "_asked_s",
        "_began_s",
        "_ended_s",
        "_matcher",
        "_routes",
        "_stop_ids",
        "error",
        "finish_reason",
        "goes_on",
        "limit",
        "logprobs",
        "media",
        "prompt",
        "prompt_logprobs",
        "sampling",
        "seed",
        "token_ids",
        "version_starts",
        "versions",
    )

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        seed: int,
        *,
        limit: int,
        stop_ids: frozenset[int],
        decode: Decode,
        goes_on: bool = False,
        media: tuple[Media, ...] = (),
    ) -> None:
        self.prompt, self.sampling, self.seed = prompt, sampling, seed
        self.media = media
        """Images and sounds in the prompt."""
        self.goes_on = goes_on
        """Its conversation may have another turn."""
        self.limit = limit
        """Most tokens it may have."""
        self._asked_s = self._began_s = self._ended_s = time.monotonic()
        self._stop_ids = stop_ids
        self._matcher = StopStringMatcher(sampling.stop_strings, decode) if sampling.stop_strings else None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: tuple[float, ...] = ()
        self._routes: list[Routes] = []
        self.versions: list[int] = []
        """The weights that its tokens are drawn from, in order."""
        self.version_starts: list[int] = []
        """Where each of them begins."""
        self.finish_reason: FinishReason | None = None
        """Set when it has ended by itself."""
        self.error: Exception | None = None
        """Set when it cannot go on."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def so_far(self) -> tuple[int, ...]:
        """Prompt and response."""
        return (*self.prompt, *self.token_ids)

    @property
    def computed(self) -> tuple[int, ...]:
        """Prompt and response but for the last token, which the model has not seen."""
        return (*self.prompt, *self.token_ids[:-1])

    @property
    def remaining(self) -> int:
        return self.limit - len(self.token_ids)

    def begin(self) -> None:
        """It has a place: until now it waited for one."""
        if not self.token_ids:
            self._began_s = time.monotonic()

    def use(self, version: int) -> None:
        """The next tokens come from these weights."""
        if self.version_starts and self.version_starts[-1] == len(self.token_ids):  # no token came from the last ones
            self.versions.pop()
            self.version_starts.pop()
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)
            self.version_starts.append(len(self.token_ids))

    def push(self, token: int, logprob: float) -> None:
        """Append a sampled token and decide whether the response ends with it."""
        if math.isnan(logprob):
            self.error = BackendError(
                f"the model's logits are not finite at token {len(self.token_ids)} of a response",
                fix="the weights have diverged: lower the learning rate, or restart from an earlier checkpoint",
            )
            return
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self._stop_ids or (self._matcher is not None and self._matcher.push(token)):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.limit:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self._ended_s = time.monotonic()

    def went(self, start: int, routes: Routes) -> None:
        """Tokens from ``start`` on went to these experts. Those that were told before keep what was told first."""
        if self.sampling.routes and not self.is_over:
            known = sum(map(len, self._routes))
            self._routes.append(routes[known - start :])

    def completion(self) -> Completion:
        """Of a response that has ended.

        Raises:
            BackendError: It could not go on.
        """
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None, "the response has not ended"
        routes = None
        if self._routes:  # the last token was drawn, and not computed
            last = numpy.full((1, *self._routes[0].shape[1:]), -1, numpy.int16)
            routes = numpy.concatenate((*self._routes, last))
        return TimedCompletion(
            token_ids(self.token_ids).declared,
            logprobs(self.logprobs).declared,
            self.finish_reason,
            tuple(self.versions),
            tuple(self.version_starts),
            self.prompt_logprobs,
            routes,
            Span(self._began_s, self._ended_s).shifted(-self._asked_s),
        )


@dataclass(frozen=True)
class ResponseLimits:
    """Limits on the tokens of a request to a model."""

    vocabulary: int
    """Token ids are below this."""
    max_sequence_tokens: int
    """Most tokens of prompt and response together."""
    end_ids: frozenset[int]
    """Tokens that end any response that does not ignore them."""
    decode: Decode
    """Tokens to text, for stop strings."""
    bound: str = "policy.max_sequence_tokens"
    """The setting behind ``max_sequence_tokens``, for messages."""
    placeholders: frozenset[int] = frozenset()
    """Tokens that stand for images and sounds, where the model sees or hears. A response that says one has ended: there
    is nothing to show."""
    has_routes: bool = False
    """The engine tells the experts that tokens go to."""

    def new_tokens(self, request: GenerationRequest) -> int:
        """Most tokens that a response may have."""
        return min(request.sampling.max_new_tokens, self.max_sequence_tokens - len(request.token_ids))

    def require(self, index: int, request: GenerationRequest) -> None:
        """Refuse what cannot be.

        Raises:
            BackendError: The prompt is empty, too long or not of this vocabulary, no token is asked for, or the model
                sees nothing of what is shown.
        """
        prompt, asked, max_tokens = request.token_ids, request.sampling.max_new_tokens, self.max_sequence_tokens
        problem, fix = None, ""
        if not prompt:
            problem, fix = "has an empty prompt", "give at least one token, e.g. the beginning-of-sequence token"
        elif len(prompt) >= max_tokens:
            problem = f"has a prompt of {len(prompt)} tokens; {self.bound} = {max_tokens} leaves no room"
            fix = "shorten the prompt, or raise policy.max_sequence_tokens as far as the model allows"
        elif (shows := bool(request.media) or is_media(max(prompt))) and not self.placeholders:
            problem = "shows images or sounds, and this engine gives its model text alone"
            fix = (
                "use a model that sees or hears and a generation backend that supports `media`, or leave such rows out"
            )
        elif shows and shown_names(prompt) - media_by_name(request.media).keys():
            problem, fix = "has ids of images or sounds that did not come with it", "give them as its media"
        elif (words := text_ids(prompt)) and (min(words) < 0 or max(words) >= self.vocabulary):
            problem = f"has token ids from {min(words)} to {max(words)}; the model knows 0 to {self.vocabulary - 1}"
            fix = "tokenize with the policy's tokenizer"
        elif request.sampling.routes and not self.has_routes:
            problem, fix = "asks for routes, and this model has no experts, or none that are told", "leave it out"
        elif asked < 1:
            problem, fix = f"asks for {asked} new tokens", "ask for at least one"
        if problem is not None:
            raise BackendError(f"generation request {index} {problem}", fix=fix)

    def begin(self, request: GenerationRequest) -> list[Response]:
        """The empty responses to a request that can be, one per seed."""
        sampling = request.sampling
        stop_ids = self.placeholders.union(sampling.stop_token_ids)
        return [
            Response(
                request.token_ids,
                sampling,
                seed,
                limit=self.new_tokens(request),
                stop_ids=stop_ids if sampling.ignore_eos else self.end_ids | stop_ids,
                decode=self.decode,
                goes_on=request.goes_on,
                media=request.media,
            )
            for seed in request.seeds
        ]

    def begin_all(self, requests: Sequence[GenerationRequest]) -> list[list[Response]]:
        """The empty responses to requests that may be wrong: one list per request, one response per seed.

        Raises:
            BackendError: As ``require``.
        """
        for index, request in enumerate(requests):
            self.require(index, request)
        return [self.begin(request) for request in requests]
