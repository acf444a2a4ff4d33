"""Requests of a driver to its worker: their names, those that were cancelled, and the times of their responses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nemorl.base.process.timing import Span, Timed
from nemorl.contracts import RequestBackend
from nemorl.types import Completion, GenerationRequest, Sample


def notify_cancelled(future: Future[Any]) -> None:
    """A done callback: without it, ``concurrent.futures.wait`` takes no notice of a future that was cancelled."""
    if future.cancelled():
        future.set_running_or_notify_cancel()


EARLY_CANCELS = 1024
"""Cancelled requests that a worker remembers though it has not seen them: calls may overtake each other."""


class NamedRequests:
    """An engine in a worker, whose requests the driver knows by number. All other verbs are the engine's own."""

    def __init__(self, engine: RequestBackend) -> None:
        self._engine = engine
        self._running: dict[int, Future[list[Completion]]] = {}
        self._cancelled: deque[int] = deque(maxlen=EARLY_CANCELS)
        self._lock = threading.Lock()

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)

    def begin(self, number: int, request: GenerationRequest) -> Future[list[Completion]]:
        """``submit`` under a number that no other request has."""
        with self._lock:
            if number in self._cancelled:
                self._cancelled.remove(number)
                gone: Future[list[Completion]] = Future()
                gone.add_done_callback(notify_cancelled)
                gone.cancel()
                return gone
            answer = self._running[number] = self._engine.submit(request)
        answer.add_done_callback(lambda _: self._forget(number))
        return answer

    def cancel(self, number: int) -> Future[None]:
        """Cancel the request with this number, also before it comes. The future is done."""
        with self._lock:
            answer = self._running.get(number)
            if answer is None:
                self._cancelled.append(number)
        if answer is not None:
            answer.cancel()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _forget(self, number: int) -> None:
        with self._lock:
            del self._running[number]


# When responses, and the episodes that they are part of, began and ended. All are moments of `time.monotonic()` in the
# process that drives the episodes. Engines may be on other machines, whose clocks differ: they say how long after its
# request a response was made, and the moment of their answer is the anchor.


class TurnSpan(NamedTuple):
    """When a turn of an episode was made.

    Example:
        >>> TurnSpan(sequence=0, stop=12, span=Span(3.0, 4.5)).span.ended_s
        4.5
    """

    sequence: int
    """Which of the episode's token sequences it stands in."""
    stop: int
    """One beyond its last token there."""
    span: Span


class TimedTurns(Timed):
    """Base class of episodes that say when each of their turns was made.

    Example:
        >>> class Episode(TimedTurns):
        ...     span, turn_spans = Span(0.0, 1.5), (TurnSpan(0, 2, Span(0.5, 1.0)),)
        >>> Episode().turn_spans[0].stop
        2
    """

    __slots__ = ()
    turn_spans: tuple[TurnSpan, ...]
    """Of the policy's turns, and of the environment's between them; on the same clock."""


class TurnPlace(NamedTuple):
    """Where an answer of the policy stands.

    Example:
        >>> TurnPlace(sequence=0, start=4, stop=7).stop
        7
    """

    sequence: int
    """Which of the episode's token sequences it stands in."""
    start: int
    """Its first token there."""
    stop: int
    """One beyond its last."""
    is_cut: bool = False
    """The token limit ended it."""


@dataclass(frozen=True, slots=True)
class PlacedSample(Sample):
    """A sample of which each answer and each seat is known. In its ``sequences`` these are still the whole episode's.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> game = PlacedSample(Prompt(0, "", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(0.0), "", "stop",
        ...                     turn_places=(TurnPlace(0, 1, 2),), seats=("white",))
        >>> game.seats
        ('white',)
    """

    turn_places: tuple[TurnPlace, ...] = ()
    """The answers that are trained, in the order in which they were asked for."""
    seats: tuple[str, ...] = ()
    """The seat of each token sequence; those of one seat are neighbours. Empty: the episode has no seats."""


@dataclass(frozen=True, slots=True)
class TimedSample(PlacedSample, TimedTurns):
    """A sample of which is known when it was made. Times make no two of them different.

    Example:
        >>> turns = (TurnSpan(0, 2, Span(3.0, 4.5)),)
        >>> sample = TimedSample(Prompt(0, "1+1=", (5,)), (5, 7), (False, True), (0.0, -0.5), Score(1.0), "2", "stop",
        ...                      span=Span(3.0, 5.0), turn_spans=turns)
        >>> sample.span.ended_s
        5.0
    """

    span: Span = field(default=Span(0.0, 0.0), compare=False)
    """From its first request, or the start of the environment that drives it, until it was scored."""
    turn_spans: tuple[TurnSpan, ...] = field(default=(), compare=False)


def spans_of(completions: Sequence[Completion], sent_s: float, answered_s: float) -> list[Span]:
    """When each of some completions that were asked for together was made.

    Args:
        completions: Those that do not say (``Timed``) were made at some time until the answer.
        sent_s: When they were asked for.
        answered_s: When all were there: the last token of the last one is taken to be drawn then.

    Example:
        >>> from nemorl_tensors.engines.responses import TimedCompletion
        >>> both = [TimedCompletion((7,), (-0.5,), "stop", span=Span(0.0, ended_s)) for ended_s in (1.0, 3.0)]
        >>> spans_of(both, sent_s=10.0, answered_s=14.0)
        [Span(began_s=11.0, ended_s=12.0), Span(began_s=11.0, ended_s=14.0)]
    """
    last_s = max((one.span.ended_s for one in completions if isinstance(one, Timed)), default=0.0)
    given_s = max(sent_s, answered_s - last_s)  # before that the request waited for the engine
    return [one.span.shifted(given_s) if isinstance(one, Timed) else Span(sent_s, answered_s) for one in completions]
