"""Agent: an environment whose episodes are played by something that calls the policy."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.agents.outcomes import FirstEpisodes
from nemorl_rl.agents.seats import Seated, trained_seats
from nemorl_rl.agents.watched import WatchedPolicy
from nemorl_rl.environments import RewardFunction

from nemorl_agents.programs.episode import COLUMN
from nemorl_agents.programs.judging import Judge, Play, describe

SHARE_TO_PLAY = 0.9
"""Of the time that the run gives an episode. The rest is for ending and scoring it."""
FIX = "mend the agent; a program must call the server that OPENAI_BASE_URL or ANTHROPIC_BASE_URL names"


class Player(Protocol):
    """Plays one episode after the other, many at once."""

    def play(self, prompt: Prompt, policy: WatchedPolicy, timeout_s: float) -> AbstractAsyncContextManager[Play]:
        """One episode, over when this is entered; what it left behind is there until this is left."""
        ...

    def close(self) -> None: ...


class Agent(Environment):
    """Has episodes played and scored."""

    name = "agent"
    policy_can_stall = True

    def __init__(
        self,
        player: Player,
        judge: Judge,
        *,
        timeout_s: float | None,
        give_up_after: int,
        untrained: Collection[str] = (),
    ) -> None:
        """
        Args:
            player: A program, a coroutine, or the built-in loop.
            judge: Scores what became of it.
            timeout_s: Of an episode. Unset: what the run leaves.
            give_up_after: First episodes without a call, after which the run ends.
            untrained: Roles of the policy that nothing is learnt from.
        """
        self._player, self._judge, self._timeout_s = player, judge, timeout_s
        self._untrained = frozenset(untrained)
        self.needs_columns = frozenset() if judge.reward is None else judge.reward.needs_columns
        self._first = FirstEpisodes(give_up_after, fix=FIX)

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> Score:
        watched = WatchedPolicy(Seated(policy, untrained=self._untrained))
        timeout_s = min(self._timeout_s or math.inf, SHARE_TO_PLAY * policy.limits.timeout_s)
        async with self._player.play(prompt, watched, timeout_s) as play:
            if play.episode.outcome != "finished" and watched.failure is not None:
                raise watched.failure  # the engine's, of which no agent is guilty
            self._first.note(watched.answers, lambda: describe(play.episode))
            return trained_seats(await self._judge.score(prompt, play), self._untrained)

    def rehearsals(self) -> Iterator[Environment]:
        reward = self._judge.reward
        if reward is None or (isinstance(reward, RewardFunction) and COLUMN in reward.required_columns()):
            return
        yield from reward.rehearsals()

    def close(self) -> None:
        self._player.close()
        if self._judge.reward is not None:
            self._judge.reward.close()
