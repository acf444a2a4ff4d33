"""LivePolicy: one episode's view of the generator. It answers, keeps to the limits and records every call."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from nemorl.errors import UsageError
from nemorl.media import Media
from nemorl.types import Completion, GenerationRequest, SamplingParams

from nemorl_rl.agents.contract import (
    AS_THE_RUN,
    REMEDY,
    CallLimitError,
    CallOptions,
    ChatMessage,
    ChatReply,
    ConstraintError,
    ContextOverflowError,
    EpisodeClosedError,
    EpisodeLimits,
    ToolChoice,
)
from nemorl_rl.agents.record import Call
from nemorl_rl.chat.media import holds_items
from nemorl_rl.environments.loop_thread import in_thread
from nemorl_rl.rollouts.seeding import derive_seed
from nemorl_rl.serving.generation_policy import GenerationPolicy
from nemorl_rl.serving.requests import spans_of

if TYPE_CHECKING:
    from nemorl_rl.chat.conversation import ChatPrompt, Conversation
    from nemorl_rl.chat.text import TextCoder


@dataclass(frozen=True)
class Sampler:
    """How an episode's calls are sampled, the same for all of a rollout."""

    generation: GenerationPolicy
    sampling: SamplingParams
    honours_clients: bool
    """A call may have its own temperature, top-p and top-k. Not in training: log-probs are taken at one temperature."""
    text: TextCoder | None = None
    """Of the model."""


class LivePolicy:
    """An ``EpisodePolicy``. Its calls may come from any thread's event loop, and at the same time."""

    def __init__(
        self,
        sampler: Sampler,
        conversation: Conversation,
        *,
        episode_id: str,
        limits: EpisodeLimits,
        seed: int,
    ) -> None:
        """
        Args:
            sampler: Where calls go.
            conversation: Messages to tokens and back, for this episode alone.
            episode_id: Who asks, for errors, and keeps its calls on one replica.
            limits: What bounds the episode.
            seed: Seeds its calls, each differently.
        """
        self.episode_id, self.limits, self.text = episode_id, limits, sampler.text
        self._sampler, self._conversation, self._seed = sampler, conversation, seed
        self._numbers = count()
        self._lock, self._processing = threading.Lock(), threading.Lock()
        self._calls: list[Call] = []
        self._rewards: dict[int, float] = {}
        """By the numbers of calls"""
        self._running: set[Future[list[Completion]]] = set()
        self._is_closed = False

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        conversation = self._conversation.speaking(options.template_options)
        if holds_items(messages):  # decoding takes its time, and other episodes share this event loop
            prompt = await in_thread(self._shown_prompt, conversation, messages, tools)
        else:
            prompt = conversation.prompt(messages, tools)
        call = await self._answer(prompt.token_ids, prompt.media, options)
        is_plain = options.json_schema is not None
        reply = conversation.reply(prompt, call.completion, tool_choice, options.stop, is_plain=is_plain)
        self._record(
            replace(
                call,
                realigned_tokens=prompt.realigned_tokens,
                malformed_tool_calls=reply.malformed_tool_calls,
                broke_tool_choice=reply.broke_tool_choice,
            )
        )
        return reply

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        call = await self._answer(tuple(token_ids), tuple(media), options)
        self._record(call)
        return call.completion

    def reward(self, value: float, completion: Completion | None = None) -> float:
        with self._lock:
            if self._is_closed:
                raise self._closed_error()
            answered = reversed(self._calls)
            call = next((one for one in answered if completion is None or one.completion is completion), None)
            if call is None:
                raise UsageError(f"{self.episode_id} has no such answer to reward", fix="reward what a call returned")
            total = self._rewards.get(call.number, 0.0) + value
            if not math.isfinite(total):
                raise UsageError(f"a reward of {value!r} makes {total!r} of an answer", fix="give finite rewards")
            self._rewards[call.number] = total
            return total

    @property
    def calls(self) -> list[Call]:
        """Those that were answered, in order, each with the rewards that it was given."""
        with self._lock:
            rewarded = (replace(call, reward=self._rewards.get(call.number)) for call in self._calls)
            return sorted(rewarded, key=lambda call: call.number)

    def close(self) -> None:
        """End the episode: what runs is cancelled, what comes is refused. Calling it twice is harmless."""
        with self._lock:
            self._is_closed = True
            running = [*self._running]
        for future in running:
            future.cancel()

    def _shown_prompt(
        self, conversation: Conversation, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> ChatPrompt:
        """Images and sounds of one episode are processed one after the other: all episodes share the machine."""
        limit = self.limits.max_sequence_tokens
        with self._processing:
            return conversation.shown_prompt(messages, tools, limit, self._require_open)

    async def _answer(self, token_ids: tuple[int, ...], media: tuple[Media, ...], options: CallOptions) -> Call:
        room = self.limits.max_sequence_tokens - len(token_ids)
        if room <= 0:
            raise ContextOverflowError(len(token_ids), self.limits.max_sequence_tokens)
        asked_s = time.monotonic()
        number, future = self._begin(token_ids, media, self._sampling(options, room), options.seed)
        try:
            [completion] = await asyncio.wrap_future(future)
        finally:
            with self._lock:
                self._running.discard(future)
        [span] = spans_of([completion], asked_s, time.monotonic())
        call = Call(number, token_ids, completion, asked_s=asked_s, span=span, media=media)
        is_constrained = options.json_schema is not None
        return replace(call, seat=options.seat, is_trained=options.is_trained, is_constrained=is_constrained)

    def _record(self, call: Call) -> None:
        with self._lock:
            if self._is_closed:
                raise self._closed_error()
            self._calls.append(call)

    def _begin(
        self, token_ids: tuple[int, ...], media: tuple[Media, ...], sampling: SamplingParams, seed: int | None
    ) -> tuple[int, Future[list[Completion]]]:
        with self._lock:
            if self._is_closed:
                raise self._closed_error()
            number = next(self._numbers)
            if number >= self.limits.max_calls:
                raise CallLimitError(
                    f"{self.episode_id} has had its {self.limits.max_calls} answers", fix="raise rollouts.max_calls"
                )
            own_seed = derive_seed(self._seed, number) if seed is None else derive_seed(self._seed, "client", seed)
            future = self._sampler.generation.submit(
                GenerationRequest(token_ids, sampling, (own_seed,), goes_on=True, media=media),
                owner=self.episode_id,
                conversation=self.episode_id,
                deadline_s=self.limits.timeout_s,
            )
            self._running.add(future)
        return number, future

    def _sampling(self, options: CallOptions, room: int) -> SamplingParams:
        run = self._sampler.sampling
        longest = min(run.max_new_tokens, room, *([options.max_new_tokens] if options.max_new_tokens else []))
        stops = (*run.stop_strings, *options.stop)
        if options.json_schema is not None and not self._sampler.generation.constrains:
            raise ConstraintError("this generation backend cannot constrain what is sampled", fix=REMEDY)
        chosen = replace(run, max_new_tokens=longest, stop_strings=stops, json_schema=options.json_schema)
        if not self._sampler.honours_clients:
            return chosen
        own = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
        return replace(chosen, **{name: value for name, value in own.items() if value is not None})

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._closed_error()

    def _closed_error(self) -> EpisodeClosedError:
        return EpisodeClosedError(f"{self.episode_id} has ended", fix="call the policy before `rollout` returns")
