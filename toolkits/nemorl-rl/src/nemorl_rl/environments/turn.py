"""One turn of many episodes: worker threads take them one by one, coroutines continue on an event loop.

The caller's thread waits for answers and is the only one that decides that a step takes too long. It waits for a step
no longer than that step's deadline, so nothing the environment does can hold it up.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemorl.base.process.logs import log_ids
from nemorl.base.process.timing import Span
from nemorl.contracts import Episode
from nemorl.environment import Environment, as_step
from nemorl.errors import ForeignError, boundary
from nemorl.types import Prompt, Score, Step

from nemorl_rl.environments.loop_thread import LoopThread


@dataclass
class TimedEpisode:
    """An episode and the seconds that the environment has spent on it."""

    inner: Episode
    spent_s: float = 0.0
    prompt: Prompt | None = None
    number: int = 0
    """Of the run's episodes, for logs."""
    span: Span = field(default=Span(0.0, 0.0))
    """Of the last turn in the environment: moments of ``time.monotonic()``."""

    @property
    def row(self) -> str:
        """The prompt it is about, for messages."""
        return "" if self.prompt is None else f" to prompt {self.prompt.index} ({self.prompt.text[:50]!r})"

    def step(self, response: str) -> Step | Awaitable[Step]:
        return self.inner.step(response)


@dataclass(eq=False)
class _Job:
    """One step of one episode."""

    index: int
    episode: TimedEpisode
    response: str
    limit_s: float
    """Seconds that it may still run; waiting does not count."""
    limit_metric: str
    """Name of the metric that counts its time-out."""
    began: float = 0.0
    taken_s: float = field(default_factory=time.monotonic)
    """When the environment was first asked."""
    task: asyncio.Task[None] | None = None
    in_thread: bool = False
    over: bool = False
    """Answered or given up: whatever else comes is ignored."""

    @property
    def deadline(self) -> float:
        return self.began + self.limit_s


class Turn:
    """Single use: one call of :meth:`answers`."""

    def __init__(
        self,
        environment: Environment,
        loop: Callable[[], LoopThread],
        *,
        timeout_s: float,
        episode_timeout_s: float | None,
        concurrency: int,
    ) -> None:
        """
        Args:
            environment: For its name and whether it is batched.
            loop: The event loop, asked for when the first coroutine comes.
            timeout_s: Longest time of a step.
            episode_timeout_s: Longest time of an episode's steps together.
            concurrency: Threads, and coroutines, that run at the same time.
        """
        self.was_late = False
        """A step was given up."""
        self._environment, self._loop = environment, loop
        self._timeout_s, self._episode_timeout_s = timeout_s, episode_timeout_s
        self._slots = concurrency
        self._slot = asyncio.Semaphore(concurrency)
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._answers: queue.SimpleQueue[tuple[_Job, Step | BaseException]] = queue.SimpleQueue()
        self._threads = 0
        self._asking = 0
        """Jobs whose ``step`` has yet to return."""
        self._asked: list[tuple[_Job, Awaitable[Step]]] = []
        """Awaitables of a batched environment, until all have asked."""
        self._last_sign = time.monotonic()

    def answers(self, episodes: Sequence[Episode], responses: Sequence[str]) -> Iterator[tuple[int, Step]]:
        """Index and answer of each episode as they come; time-outs are answers, exceptions are raised."""
        jobs = [self._job(i, e, response) for i, (e, response) in enumerate(zip(episodes, responses, strict=True))]
        self._waiting.extend(jobs)
        self._slots, self._asking = min(self._slots, len(jobs)), len(jobs)
        shortest_s = min((job.limit_s for job in jobs), default=0.0)
        missing = len(jobs)
        late_in_a_row = 0
        try:
            self._add_thread()
            while missing:
                try:
                    job, answer = self._next_answer(shortest_s)
                except queue.Empty:
                    late = self._give_up(self._late())
                    late_in_a_row += len(late)
                    if late_in_a_row >= self._slots or self._is_silent():
                        late += self._give_up_all(jobs)
                    self.was_late |= bool(late)
                    for job in late:
                        yield job.index, Step(Score(0.0, metrics={job.limit_metric: 1.0}))
                    missing -= len(late)
                    continue
                late_in_a_row = 0
                missing -= 1
                yield job.index, self._checked(job, answer)
        finally:
            self._give_up_all(jobs)

    def _job(self, index: int, episode: Episode, response: str) -> _Job:
        timed = episode if isinstance(episode, TimedEpisode) else TimedEpisode(episode)
        left_s = math.inf if self._episode_timeout_s is None else self._episode_timeout_s - timed.spent_s
        if left_s < self._timeout_s:
            return _Job(index, timed, response, max(left_s, 0.0), "episode_timeout")
        return _Job(index, timed, response, self._timeout_s, "environment_timeout")

    def _checked(self, job: _Job, answer: Any) -> Step:
        with boundary(self._environment.owner):
            if isinstance(answer, BaseException):
                raise raisable(answer, self._environment.owner)
            step = as_step(answer, owner=self._environment.owner)
            require_finite(step.score, f"{job.response[:50]!r}{job.episode.row}")
        return step

    # Deadlines, in the caller's thread

    def _next_answer(self, shortest_s: float) -> tuple[_Job, Step | BaseException]:
        """The next answer, or ``queue.Empty`` at the nearest deadline. The clock is read only when none is there."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return self._answers.get(timeout=self._patience_s(shortest_s))

    def _patience_s(self, shortest_s: float) -> float:
        """Seconds until the nearest deadline of a job that runs, or that begins meanwhile and has ``shortest_s``."""
        with self._lock:
            nearest = min((job.deadline for job in self._running), default=math.inf)
        return max(0.0, min(nearest - time.monotonic(), shortest_s))

    def _late(self) -> list[_Job]:
        now = time.monotonic()
        with self._lock:
            return sorted((job for job in self._running if job.deadline <= now), key=lambda job: job.index)

    def _is_silent(self) -> bool:
        """Nothing runs, begins or ends: the event loop is blocked."""
        with self._lock:
            return not self._running and time.monotonic() - self._last_sign > self._timeout_s

    def _give_up_all(self, jobs: Sequence[_Job]) -> list[_Job]:
        """Begin nothing more and wait for nothing."""
        with self._lock:
            self._waiting.clear()
        return self._give_up(jobs)

    def _give_up(self, jobs: Sequence[_Job]) -> list[_Job]:
        """Stop waiting for jobs; those that were not over."""
        given_up = []
        for job in jobs:
            with self._lock:
                if job.over:
                    continue
                job.over = True
                job.episode.span = Span(job.taken_s, time.monotonic())
                self._running.discard(job)
                was_in_thread, job.in_thread = job.in_thread, False
            given_up.append(job)
            if job.task is not None:
                self._loop().loop.call_soon_threadsafe(job.task.cancel)
            elif was_in_thread:  # the thread stays behind; another one takes its place
                with self._lock:
                    self._threads -= 1
                self._add_thread()
                self._has_asked()
        return given_up

    # Worker threads

    def _add_thread(self) -> None:
        with self._lock:
            if not self._waiting or self._threads >= self._slots:
                return
            self._threads += 1
        name = f"environment-{self._environment.name}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        """Take jobs until none is left. Threads are added one by one while there is more to do than they manage, so
        that coroutines, whose ``step`` returns at once, do not get a thread each."""
        while (job := self._take()) is not None:
            self._add_thread()
            answer: Any
            try:
                with log_ids(episode=job.episode.number):
                    answer = job.episode.step(job.response)
            except BaseException as error:
                answer = error
            with self._lock:
                if not job.in_thread:  # given up, and this thread was replaced
                    return
                job.in_thread = False
            if isinstance(answer, Awaitable):
                self._pause(job)
                with self._lock:
                    self._asked.append((job, answer))
            else:
                self._finish(job, answer)
            self._has_asked()

    def _take(self) -> _Job | None:
        with self._lock:
            if not self._waiting:
                self._threads -= 1
                return None
            job = self._waiting.popleft()
            job.in_thread = True
            self._begin(job)
            job.taken_s = job.began
            return job

    def _has_asked(self) -> None:
        """One more ``step`` has returned: await what there is to await, in a batched environment only when all have."""
        with self._lock:
            self._asking -= 1
            if self._environment.batched and self._asking > 0:
                return
            asked, self._asked = self._asked, []
        for job, awaitable in asked:
            self._loop().loop.call_soon_threadsafe(self._await, job, awaitable)

    # On the event loop

    def _await(self, job: _Job, awaitable: Awaitable[Step]) -> None:
        if job.over:
            _close(awaitable)
        else:
            with log_ids(episode=job.episode.number):
                job.task = asyncio.get_running_loop().create_task(self._answer(job, awaitable))

    async def _answer(self, job: _Job, awaitable: Awaitable[Step]) -> None:
        try:
            async with self._slot:
                with self._lock:
                    if not job.over:
                        self._begin(job)
                if job.over:
                    _close(awaitable)
                    return
                answer: Any = await awaitable
        except BaseException as error:
            if job.over:  # cancelled by us
                _close(awaitable)
                return
            answer = error
        self._finish(job, answer)

    # The clock of a job

    def _begin(self, job: _Job) -> None:
        job.began = self._last_sign = time.monotonic()
        self._running.add(job)

    def _pause(self, job: _Job) -> None:
        """It waits for its turn on the event loop, which is not its own time."""
        with self._lock:
            self._running.discard(job)
            self._last_sign = time.monotonic()
            took_s = self._last_sign - job.began
            job.limit_s -= took_s
            job.episode.spent_s += took_s

    def _finish(self, job: _Job, answer: Any) -> None:
        self._pause(job)
        with self._lock:
            if job.over:
                return
            job.over = True
            job.episode.span = Span(job.taken_s, time.monotonic())
        self._answers.put((job, answer))


def raisable(error: BaseException, owner: str) -> Exception:
    """What ended a thread or a coroutine of ``owner``, for the caller's thread to raise.

    ``SystemExit`` and its like would pass there for what a person asks of it.
    """
    if isinstance(error, Exception):
        return error
    what = f"{owner} raised {type(error).__name__}: {error}"
    foreign = ForeignError(what, fix="raise an Exception to end a run with an error")
    foreign.__cause__ = error
    return foreign


def require_finite(score: Score, response: str) -> None:
    """Refuse what cannot be added up: one NaN makes a whole step's mean, and the advantages of its group, NaN."""
    named = {f"component {name!r} of the score of": value for name, value in score.components.items()}
    named |= {f"metric {name!r} of the score of": value for name, value in score.metrics.items()}
    for what, value in {"the reward of": score.reward, **named}.items():
        try:
            is_finite = math.isfinite(value)
        except (TypeError, OverflowError):
            is_finite = False
        if not is_finite:
            raise ValueError(f"{what} {response} is {value!r:.80}, not a finite number")


def _close(awaitable: Awaitable[Step]) -> None:
    """Nobody will await it: spare the warning."""
    if isinstance(awaitable, Coroutine):
        awaitable.close()
