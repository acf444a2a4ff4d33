"""FreeTurns: conversations with an environment, each at its own pace in place of all turn by turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from nemorl.contracts import Episode
from nemorl.contracts.environment import Environment, as_step
from nemorl.types import Prompt, Score, Step

from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.chat.media import ShownTokens, shown_parts
from nemorl_rl.data.row_sizes import longest_text
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments.faults import late, score_of
from nemorl_rl.environments.loop_thread import in_thread
from nemorl_rl.rollouts.prompts import require_first_words


class FreeTurns(Environment):
    """Drives the episodes of an environment that answers turn by turn. Seeds are those of turns taken together."""

    def __init__(self, environment: Environment, tokenizer: Tokenizer, *, max_turns: int, timeout_s: float) -> None:
        """
        Args:
            environment: Has ``start``.
            tokenizer: Of the policy.
            max_turns: Responses per episode at most.
            timeout_s: Longest time of one answer of the environment; then the episode ends.
        """
        self.name = environment.name
        self._environment, self._tokenizer = environment, tokenizer
        self._max_turns, self._timeout_s = max_turns, timeout_s

    @property
    def owner(self) -> str:
        return self._environment.owner

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> Score:
        require_first_words(prompt, self.owner)
        try:
            episode = await in_thread(self._environment.start, prompt)
        except Exception as error:
            return score_of(error, "reset")
        told, media, scores = list(prompt.token_ids), list(prompt.media), list[Score]()
        for turn in range(self._max_turns):
            completion = await policy.complete(told, media)
            told += completion.token_ids
            step = await self._step(episode, self._tokenizer.decode(completion.token_ids))
            scores.append(step.score)
            is_last = turn == self._max_turns - 1
            limit = policy.limits.max_sequence_tokens
            observed = None if is_last else await self._observed(step, told, limit)
            if observed is None:
                break
            told += observed.ids
            media += observed.media
        return replace(total_score(scores), turn_rewards=tuple(score.reward for score in scores))

    async def _observed(self, step: Step, told: Sequence[int], limit: int) -> ShownTokens | None:
        if isinstance(step.observation, str | None):
            return observation(step, told, self._tokenizer, limit)
        # Images take their time, and other episodes share this event loop.
        return await in_thread(observation, step, told, self._tokenizer, limit)

    async def _step(self, episode: Episode, response: str) -> Step:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                answer = await in_thread(episode.step, response)
                return as_step(await answer if isinstance(answer, Awaitable) else answer, owner=self.owner)
        except TimeoutError:
            if not limit.expired():
                raise
            return Step(late("environment_timeout", by_policy=self._environment.policy_can_stall))
        except Exception as error:
            return Step(score_of(error, "step"))


def observation(step: Step, told: Sequence[int], tokenizer: Tokenizer, limit: int) -> ShownTokens | None:
    """What the environment adds to the tokens of the episode; ``None``: it has ended, or nobody could answer."""
    if step.done or step.observation is None:
        return None
    if isinstance(step.observation, str):
        # What is longer leaves no room for a response, whatever else it says.
        shown = ShownTokens(tuple(tokenizer.encode_observation(step.observation[: longest_text(limit)])))
    else:
        shown = shown_parts(step.observation, tokenizer)
    return shown if len(told) + len(shown.ids) < limit else None


def total_score(scores: Sequence[Score]) -> Score:
    """Rewards and parts add up over turns; the answer, its correctness, how it ended and what there is to say of it are
    the last turn's word."""
    if len(scores) == 1:
        return scores[0]
    components: Counter[str] = Counter()
    metrics: Counter[str] = Counter()
    for score in scores:
        components.update(score.components)
        metrics.update(score.metrics)
    last = scores[-1]
    reward, valid = sum(score.reward for score in scores), all(score.valid for score in scores)
    sums = Score(reward, dict(components), dict(metrics), last.correct, last.answer, valid)
    return replace(sums, outcome=last.outcome, cause=last.cause, feedback=last.feedback)
