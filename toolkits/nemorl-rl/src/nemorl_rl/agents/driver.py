"""Many episodes at once, each driven by its environment: bounded, timed, cancelled cleanly, and none waits for another.

They are scheduled as the steps of turn-based environments are (``EnvironmentPool.run``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nemorl.base.process.timing import Span
from nemorl.contracts.environment import Environment, as_score
from nemorl.errors import DeadlineError, boundary
from nemorl.types import Prompt, Sample, Score

from nemorl_rl.agents.contract import EpisodeError, EpisodeLimits
from nemorl_rl.agents.policy import LivePolicy, Sampler
from nemorl_rl.agents.record import to_sample
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments.faults import failure, late
from nemorl_rl.environments.pool import EnvironmentPool, require_finite
from nemorl_rl.environments.scheduler import Job
from nemorl_rl.rollouts.seeding import derive_seed

if TYPE_CHECKING:
    from nemorl_rl.chat.codec import ChatCodec

GRACE_S = 10.0
"""For an episode that was cancelled to end. One that does not is left behind."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Episode(Job):
    prompt: Prompt
    policy: LivePolicy


class AgentDriver:
    """Runs the episodes of one rollout. Single use."""

    def __init__(
        self,
        environment: Environment,
        sampler: Sampler,
        tokenizer: Tokenizer,
        codec: ChatCodec,
        pool: EnvironmentPool,
        *,
        limits: EpisodeLimits,
    ) -> None:
        """
        Args:
            environment: Drives each episode.
            sampler: Where their calls go.
            tokenizer: For the text of the last answer.
            codec: Messages to tokens and back.
            pool: Runs them.
            limits: What bounds each.
        """
        self._environment, self._sampler, self._tokenizer, self._codec = environment, sampler, tokenizer, codec
        self._pool, self._limits = pool, limits

    def groups(
        self, prompts: Sequence[Prompt], numbers: Mapping[int, Sequence[int]], seed: int
    ) -> Iterator[list[Sample]]:
        """The episodes of each prompt that have these numbers; a group when its last one has ended."""
        groups = {prompt.index: [self._new(prompt, g, seed) for g in numbers[prompt.index]] for prompt in prompts}
        episodes = [episode for group in groups.values() for episode in group]
        samples: dict[_Episode, Sample] = {}
        silence_s = self._limits.timeout_s + GRACE_S
        try:
            with closing(self._pool.run(episodes, silence_s=silence_s, on_dead=self._require_free_loop)) as ended:
                for episode in ended:
                    samples[episode] = self._sample(episode)
                    group = groups[episode.prompt.index]
                    if all(one in samples for one in group):
                        yield [samples.pop(one) for one in group]
                        del groups[episode.prompt.index]
        finally:
            for episode in episodes:
                episode.policy.close()

    def _new(self, prompt: Prompt, g: int, seed: int) -> _Episode:
        own_seed = derive_seed(seed, prompt.index, g)
        name = f"episode {prompt.index}.{g} ({own_seed:016x})"
        conversation = Conversation(self._codec, own_seed)
        policy = LivePolicy(self._sampler, conversation, episode_id=name, limits=self._limits, seed=own_seed)
        call, limit_s = partial(self._score, prompt, policy), self._limits.timeout_s + GRACE_S
        return _Episode(call=call, limit_s=limit_s, prompt=prompt, policy=policy)

    def _sample(self, episode: _Episode) -> Sample:
        owner = self._environment.owner
        episode.policy.close()
        with boundary(owner):
            failed = self._timed_out(episode.policy) if episode.is_late else failure(episode.answer, "episode")
            score = failed or episode.result(owner)
            require_finite(score, f"episode of prompt {episode.prompt.index} ({episode.prompt.text[:50]!r})")
        calls = episode.policy.calls
        response = self._tokenizer.decode(calls[-1].completion.token_ids) if calls else ""
        version, span = self._sampler.generation.version, Span(episode.began_s, episode.ended_s)
        sample = to_sample(episode.prompt, calls, score, response, version=version, span=span)
        require_finite(sample.score, f"episode of prompt {episode.prompt.index} with the rewards of its answers")
        return sample

    def _require_free_loop(self) -> None:
        if not self._pool.running_loop().responds(GRACE_S):
            raise DeadlineError(
                f"{self._environment.owner} blocks the event loop on which all of its episodes run",
                fix="await in `rollout`, and call what blocks through asyncio.to_thread",
            )

    # On the event loop

    async def _score(self, prompt: Prompt, policy: LivePolicy) -> Score:
        """The environment's score of the episode, or that of one that went too far."""
        try:
            async with asyncio.timeout(self._limits.timeout_s) as limit:
                result = await self._environment.rollout(prompt, policy)
        except TimeoutError:
            if limit.expired():
                return self._timed_out(policy)
            raise
        except EpisodeError as error:
            name = type(error).__name__
            return Score(0.0, metrics={f"ended_by_{name}": 1.0}, outcome="truncated", cause=name)
        finally:
            policy.close()
        return Score(0.0, valid=False) if result is None else as_score(result, owner=self._environment.owner)

    def _timed_out(self, policy: LivePolicy) -> Score:
        """The clock of an episode runs while the policy answers: whoever took more of it was late."""
        answering_s = sum(call.span.ended_s - call.span.began_s for call in policy.calls)
        by_policy = self._environment.policy_can_stall or answering_s > self._limits.timeout_s / 2
        return late("episode_timeout", by_policy=by_policy)
