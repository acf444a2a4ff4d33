"""Many episodes at once, each driven by its environment: bounded, timed, cancelled cleanly, and none waits for another.

The caller's thread waits for episodes and is the only one that decides that one takes too long: nothing that an
environment does on the event loop can hold it up.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemorl.base.process.timing import Span
from nemorl.environment import Environment, as_score
from nemorl.errors import DeadlineError, boundary
from nemorl.types import Prompt, Sample, Score

from nemorl_rl.agents.contract import EpisodeError, EpisodeLimits
from nemorl_rl.agents.policy import LivePolicy, Sampler
from nemorl_rl.agents.record import to_sample
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments.loop_thread import LoopThread
from nemorl_rl.environments.turn import raisable, require_finite
from nemorl_rl.rollouts.seeding import derive_seed

if TYPE_CHECKING:
    from nemorl_rl.chat.codec import ChatCodec

GRACE_S = 10.0
"""For an episode that was cancelled to end. One that does not is left behind."""


@dataclass(eq=False)
class _Episode:
    prompt: Prompt
    policy: LivePolicy
    began_s: float = math.inf
    """A moment of ``time.monotonic()``."""
    ended_s: float = math.inf
    """Likewise."""
    is_over: bool = False


class AgentDriver:
    """Runs the episodes of one rollout. Single use."""

    def __init__(
        self,
        environment: Environment,
        sampler: Sampler,
        tokenizer: Tokenizer,
        codec: ChatCodec,
        loop: Callable[[], LoopThread],
        *,
        limits: EpisodeLimits,
        concurrency: int,
    ) -> None:
        """
        Args:
            environment: Drives each episode.
            sampler: Where their calls go.
            tokenizer: For the text of the last answer.
            codec: Messages to tokens and back.
            loop: The event loop on which they run.
            limits: What bounds each.
            concurrency: Episodes at the same time.
        """
        self._environment, self._sampler, self._tokenizer, self._codec = environment, sampler, tokenizer, codec
        self._loop, self._limits = loop, limits
        self.was_late = False
        """An episode did not end when it was cancelled."""
        self._slots = asyncio.Semaphore(concurrency)
        self._ended: queue.SimpleQueue[tuple[_Episode, Score | Exception]] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()

    def groups(self, prompts: Sequence[Prompt], size: int, seed: int) -> Iterator[list[Sample]]:
        """``size`` episodes of each prompt; a group when its last one has ended."""
        groups = {prompt.index: [self._new(prompt, g, seed) for g in range(size)] for prompt in prompts}
        running = {episode for group in groups.values() for episode in group}
        samples: dict[_Episode, Sample] = {}
        loop = self._loop()
        for group in groups.values():
            for episode in group:
                loop.loop.call_soon_threadsafe(self._start, episode)
        try:
            while running:
                for episode, outcome in self._next_ended(running):
                    running.discard(episode)
                    samples[episode] = self._sample(episode, outcome)
                    group = groups[episode.prompt.index]
                    if all(one in samples for one in group):
                        yield [samples.pop(one) for one in group]
                        del groups[episode.prompt.index]
        finally:
            for episode in running:
                episode.is_over = True
                episode.policy.close()
            loop.loop.call_soon_threadsafe(self._cancel_all)

    def _new(self, prompt: Prompt, g: int, seed: int) -> _Episode:
        own_seed = derive_seed(seed, prompt.index, g)
        name = f"episode {prompt.index}.{g} ({own_seed:016x})"
        conversation = Conversation(self._codec, own_seed)
        policy = LivePolicy(self._sampler, conversation, episode_id=name, limits=self._limits, seed=own_seed)
        return _Episode(prompt, policy)

    # In the caller's thread

    def _next_ended(self, running: set[_Episode]) -> list[tuple[_Episode, Score | Exception]]:
        """The next episode that ended, or those that are given up."""
        deadline_s = self._limits.timeout_s + GRACE_S
        nearest_s = min(episode.began_s for episode in running) + deadline_s
        patience_s = min(max(0.0, nearest_s - time.monotonic()), deadline_s)
        try:
            episode, outcome = self._ended.get(timeout=patience_s)
        except queue.Empty:
            now_s = time.monotonic()
            late = [episode for episode in running if episode.began_s + deadline_s <= now_s]
            if not late and not self._loop().responds(GRACE_S):
                raise self._blocked_error() from None
            self.was_late |= bool(late)
            for episode in late:
                episode.is_over = True
                episode.policy.close()
            return [(episode, _timed_out()) for episode in late]
        return [(episode, outcome)] if episode in running else []

    def _sample(self, episode: _Episode, outcome: Score | Exception) -> Sample:
        episode.is_over = True
        with boundary(self._environment.owner):
            if isinstance(outcome, Exception):
                raise outcome
            require_finite(outcome, f"episode of prompt {episode.prompt.index} ({episode.prompt.text[:50]!r})")
        calls = episode.policy.calls
        response = self._tokenizer.decode(calls[-1].completion.token_ids) if calls else ""
        version = self._sampler.generation.version
        span = Span(episode.began_s, min(episode.ended_s, time.monotonic()))
        return to_sample(episode.prompt, calls, outcome, response, version=version, span=span)

    def _blocked_error(self) -> DeadlineError:
        return DeadlineError(
            f"{self._environment.owner} blocks the event loop on which all of its episodes run",
            fix="await in `rollout`, and call what blocks through asyncio.to_thread",
        )

    # On the event loop

    def _start(self, episode: _Episode) -> None:
        task = asyncio.get_running_loop().create_task(self._run(episode))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel_all(self) -> None:
        for task in [*self._tasks]:
            task.cancel()

    async def _run(self, episode: _Episode) -> None:
        async with self._slots:
            if episode.is_over:
                return
            episode.began_s = time.monotonic()
            try:
                try:
                    outcome = await self._outcome(episode)
                finally:
                    episode.ended_s = time.monotonic()
            except BaseException as error:
                if episode.is_over and not isinstance(error, Exception):  # cancelled by us
                    raise
                self._ended.put((episode, raisable(error, self._environment.owner)))
            else:
                self._ended.put((episode, outcome))
            finally:
                episode.policy.close()

    async def _outcome(self, episode: _Episode) -> Score:
        """What the environment says of the episode, or what becomes of one that went too far."""
        try:
            async with asyncio.timeout(self._limits.timeout_s) as limit:
                result = await self._environment.rollout(episode.prompt, episode.policy)
        except TimeoutError:
            if limit.expired():
                return _timed_out()
            raise
        except EpisodeError as error:
            return Score(0.0, metrics={f"ended_by_{type(error).__name__}": 1.0})
        if result is None:
            return Score(0.0, valid=False)
        return as_score(result, owner=self._environment.owner)


def _timed_out() -> Score:
    return Score(0.0, metrics={"episode_timeout": 1.0})
