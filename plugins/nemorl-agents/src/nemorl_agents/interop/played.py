"""PlayedEpisodes: environments whose episodes another project plays, with our gateway as its model server."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from nemorl.contracts.environment import Environment
from nemorl.errors import UsageError
from nemorl.types import Prompt, Score
from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.agents.gateways import Access, EpisodeGateway, start_gateway
from nemorl_rl.agents.outcomes import Ending, FirstEpisodes, worth
from nemorl_rl.agents.seats import Seated
from nemorl_rl.agents.watched import WatchedPolicy
from nemorl_rl.environments.loop_thread import in_thread

from nemorl_agents.interop.episodes_config import PlayedConfig

SHARE_TO_PLAY = 0.9
"""Of the time that the run gives an episode. The rest is for ending it."""


@dataclass(frozen=True)
class Played:
    """The other project's result of an episode."""

    score: Score | None = None
    """``None``: it gave no usable reward, and ``problem`` says why."""
    problem: str = ""
    is_timeout: bool = False
    """One of its own deadlines ended it."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class PlayedEpisodes(Environment):
    """Opens the gateway for an episode, has it played, and scores it by its outcome."""

    def __init__(self, config: PlayedConfig, *, fix: str, untrained: Collection[str] = ()) -> None:
        """
        Args:
            config: The fields that such environments share.
            fix: What an error advises where no first episode gets an answer of the policy.
            untrained: Roles of the policy that nothing is learnt from.
        """
        self._outcomes, self._timeout_s = dict(config.outcomes), config.timeout_s
        self._rules, self._fix, self._untrained = config.gateway.rules, fix, frozenset(untrained)
        self._first = FirstEpisodes(config.give_up_after, fix=fix)
        self._lock = threading.Lock()
        self._gateway: EpisodeGateway | None = None

    @abstractmethod
    def begin(self) -> None:
        """Have all that episodes need running. Called before each of them, in a thread; the first call does it."""

    @abstractmethod
    async def play(self, prompt: Prompt, policy: WatchedPolicy, access: Access) -> Played:
        """One episode. Cancelled at its deadline."""

    @abstractmethod
    def end(self) -> None:
        """End what ``begin`` started. Twice is harmless."""

    async def try_out(self, prompt: Prompt, policy: EpisodePolicy) -> None:
        """One episode whose policy says nothing of use. Whatever it earns, the policy must have been asked."""
        watched = WatchedPolicy(Seated(policy, untrained=self._untrained))
        played, outcome, _ = await self._episode(prompt, watched)
        if not watched.answers:
            raise UsageError(
                f"a trial episode got no answer of the policy: {outcome}; {played.problem or 'it told of no error'}",
                fix=self._fix,
            )

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> Score:
        watched = WatchedPolicy(Seated(policy, untrained=self._untrained))
        played, outcome, metrics = await self._episode(prompt, watched)
        if outcome != "finished" and watched.failure is not None:
            raise watched.failure  # the engine's, of which the other project is not guilty
        self._first.note(watched.answers, lambda: f"{outcome}; {played.problem or 'it told of no error'}")
        score = await worth(outcome, self._outcomes, lambda: _score(played), lambda: played.problem)
        return replace(score, metrics={**score.metrics, **played.metrics, **metrics})

    async def _episode(self, prompt: Prompt, watched: WatchedPolicy) -> tuple[Played, Ending, Mapping[str, float]]:
        """Its result, its outcome, and the metrics of its traffic."""
        gateway = await in_thread(self._running)
        access = gateway.open(watched)
        outcome: Ending
        try:
            async with asyncio.timeout(self._time(watched)) as limit:
                played = await self.play(prompt, watched, access)
            outcome = _outcome(played, watched)
        except TimeoutError:
            if not limit.expired():
                raise
            played, outcome = Played(problem="it was ended at its deadline"), "timeout"
        finally:
            traffic = gateway.close(access)
        return played, outcome, traffic.metrics()

    def _time(self, policy: EpisodePolicy) -> float:
        return min(self._timeout_s or math.inf, SHARE_TO_PLAY * policy.limits.timeout_s)

    def _running(self) -> EpisodeGateway:
        with self._lock:
            self.begin()
            if self._gateway is None:
                self._gateway = start_gateway(self._rules)
            return self._gateway

    def close(self) -> None:
        with self._lock:
            gateway, self._gateway = self._gateway, None
            if gateway is not None:
                gateway.shutdown()
            self.end()


def _outcome(played: Played, policy: WatchedPolicy) -> Ending:
    if played.is_timeout:
        return "timeout"
    if played.score is None:
        return "crashed" if policy.refusal is None else "stopped"
    return "finished" if policy.answers else "no_calls"


async def _score(played: Played) -> Score:
    """The other project's score. Where it has none and ``outcomes`` wants it all the same, nothing is learnt."""
    return played.score or Score(0.0, valid=False)


def usable(reward: object, whose: str) -> tuple[float | None, str]:
    """A reward as a finite number, or why it is none."""
    if isinstance(reward, bool | int | float) and abs(reward) <= sys.float_info.max:
        return float(reward), ""
    return None, f"{whose} is {reward!r:.60}, and no finite number"
