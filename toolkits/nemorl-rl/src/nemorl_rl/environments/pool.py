"""EnvironmentPool: many episodes at once, with a limit on how many and on how long each takes."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self

from nemorl.base.process.logs import log_ids
from nemorl.base.process.timing import Span
from nemorl.contracts import Episode
from nemorl.contracts.environment import Environment, as_step
from nemorl.errors import boundary
from nemorl.types import Prompt, Score, Step

from nemorl_rl.config import RolloutConfig
from nemorl_rl.environments.faults import failure, late, score_of
from nemorl_rl.environments.loop_thread import LoopThread
from nemorl_rl.environments.scheduler import J, Job, Scheduler
from nemorl_rl.rollouts.outcomes import OutcomeTable

HEARTBEAT_S = 1.0
"""An event loop that does not turn for this long is running blocking code."""


@dataclass
class TimedEpisode:
    """An episode and the seconds that the environment has spent on it."""

    inner: Episode
    prompt: Prompt
    number: int
    """Of the run's episodes, for logs."""
    spent_s: float = 0.0
    span: Span = field(default=Span(0.0, 0.0))
    """Of the last turn in the environment: moments of ``time.monotonic()``."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Turn(Job):
    """One step of one episode."""

    index: int
    episode: TimedEpisode
    response: str
    limit_metric: str
    """Name of the metric that counts its time-out."""


@dataclass(frozen=True)
class _Failed:
    """An episode that could not begin."""

    score: Score

    def step(self, _response: str) -> Step:
        return Step(self.score)


class EnvironmentPool:
    """Steps many episodes at once: bounded, timed, and with every failure attributed.

    Blocking environments get a thread per running step, async ones are coroutines on one event loop that lives as long
    as the pool, so clients may keep their connections. A step that takes longer than ``timeout_s`` ends its episode
    and counts in ``environment_timeout``; an episode whose steps together take longer than ``episode_timeout_s``
    likewise, in ``episode_timeout``. The others go on. When as many steps in a row as run at once
    have timed out, the environment is taken for dead and the rest of the turn is given up, so that a dead service costs
    one time-out and not one per response.

    Neither scores 0: ``Score.outcome`` says whose doing it was. So with a step that raises because a connection, a
    service or a machine failed. One that raises anything else stops the run with the environment named.
    A coroutine that is given up is cancelled. Python cannot end a thread: one that is stuck is abandoned and replaced.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        timeout_s: float = 60.0,
        episode_timeout_s: float | None = None,
        max_calls: int = 64,
        chat_renderer: str | None = None,
        turns: Literal["together", "free"] = "together",
        concurrency: int = 16,
        on_outcome: OutcomeTable | None = None,
    ) -> None:
        """
        Args:
            environment: What scores.
            timeout_s: Longest time of one step; waiting for a free slot does not count.
            episode_timeout_s: Longest time of all steps of an episode; generation does not count. Unset: no limit.
            max_calls: Answers that an episode of an agent may ask of the policy.
            chat_renderer: Writes messages of agents, instead of the model's chat template.
            turns: Whether conversations take their turns together.
            concurrency: Steps, or episodes of agents, that run at the same time.
            on_outcome: What is learnt from episodes that end without a verdict.
        """
        self.environment = environment
        self.timeout_s = timeout_s
        self.episode_timeout_s = episode_timeout_s
        self.max_calls = max_calls
        self.chat_renderer = chat_renderer
        self.turns = turns
        self.concurrency = concurrency
        self.on_outcome = on_outcome or OutcomeTable()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    @classmethod
    def from_config(cls, environment: Environment, rollouts: RolloutConfig) -> Self:
        """A pool with a run's settings."""
        return cls(
            environment,
            timeout_s=rollouts.environment_timeout_s,
            episode_timeout_s=rollouts.episode_timeout_s,
            max_calls=rollouts.max_calls,
            chat_renderer=rollouts.chat_renderer,
            turns=rollouts.turns,
            concurrency=rollouts.environment_concurrency,
            on_outcome=rollouts.on_outcome,
        )

    def start(self, prompt: Prompt) -> TimedEpisode:
        with boundary(self.environment.owner):
            number = next(self._numbers)
            with log_ids(episode=number):
                try:
                    inner = self.environment.start(prompt)
                except Exception as error:
                    inner = _Failed(score_of(error, "reset"))
                return TimedEpisode(inner, prompt, number)

    def step(self, episodes: Sequence[TimedEpisode], responses: Sequence[str]) -> list[Step]:
        """One turn of each episode; results in order."""
        by_index = dict(self.stream(episodes, responses))
        return [by_index[index] for index in range(len(episodes))]

    def stream(self, episodes: Sequence[TimedEpisode], responses: Sequence[str]) -> Iterator[tuple[int, Step]]:
        """One turn of each episode: its index and the environment's answer, whichever comes first."""
        turns = [self._turn(i, e, response) for i, (e, response) in enumerate(zip(episodes, responses, strict=True))]
        with closing(self.run(turns, silence_s=self.timeout_s)) as ended:
            for turn in ended:
                turn.episode.spent_s += turn.spent_s
                turn.episode.span = Span(turn.taken_s, turn.ended_s)
                yield turn.index, self._step(turn)

    def run(
        self, jobs: Sequence[J], *, silence_s: float, on_dead: Callable[[], None] = lambda: None
    ) -> Generator[J, None, None]:
        """Calls of the environment as they end or are given up (``Scheduler``)."""
        scheduler = Scheduler(
            self.environment.name,
            self.running_loop,
            concurrency=self.concurrency,
            silence_s=silence_s,
            batched=self.environment.batched,
            on_dead=on_dead,
        )
        try:
            yield from scheduler.ended(jobs)
        finally:
            if scheduler.was_late:
                self._replace_blocked_loop()

    def _turn(self, index: int, episode: TimedEpisode, response: str) -> _Turn:
        left_s = math.inf if self.episode_timeout_s is None else max(0.0, self.episode_timeout_s - episode.spent_s)
        return _Turn(
            call=partial(episode.inner.step, response),
            limit_s=min(left_s, self.timeout_s),
            ids={"episode": episode.number},
            index=index,
            episode=episode,
            response=response,
            limit_metric="episode_timeout" if left_s < self.timeout_s else "environment_timeout",
        )

    def _step(self, turn: _Turn) -> Step:
        """Its answer; time-outs and failures of what it depends on are answers, other exceptions are raised."""
        if turn.is_late:
            return Step(late(turn.limit_metric, by_policy=self.environment.policy_can_stall))
        failed = failure(turn.answer, "step")
        if failed is not None:
            return Step(failed)
        owner = self.environment.owner
        with boundary(owner):
            step = as_step(turn.result(owner), owner=owner)
            prompt = turn.episode.prompt
            require_finite(step.score, f"{turn.response[:50]!r} to prompt {prompt.index} ({prompt.text[:50]!r})")
        return step

    def close(self) -> None:
        try:
            self.environment.close()
        finally:
            with self._lock:
                loop, self._loop = self._loop, None
            if loop is not None:
                loop.stop()

    def running_loop(self) -> LoopThread:
        """The event loop of its coroutines, started when it is first asked for."""
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread(f"environment-{self.environment.name}-loop")
            return self._loop

    def _replace_blocked_loop(self) -> None:
        """A coroutine that blocks takes the loop with it; what comes next gets another one."""
        with self._lock:
            loop = self._loop
        if loop is not None and not loop.responds(HEARTBEAT_S):
            loop.stop()
            with self._lock:
                self._loop = None if self._loop is loop else self._loop


def require_finite(score: Score, response: str) -> None:
    """Refuse what cannot be added up: one NaN makes a whole step's mean, and the advantages of its group, NaN."""
    named = {f"component {name!r} of the score of": value for name, value in score.components.items()}
    named |= {f"metric {name!r} of the score of": value for name, value in score.metrics.items()}
    named |= {f"the reward of turn {turn} of": value for turn, value in enumerate(score.turn_rewards)}
    for what, value in {"the reward of": score.reward, **named}.items():
        try:
            is_finite = math.isfinite(value)
        except (TypeError, OverflowError):
            is_finite = False
        if not is_finite:
            raise ValueError(f"{what} {response} is {value!r:.80}, not a finite number")
