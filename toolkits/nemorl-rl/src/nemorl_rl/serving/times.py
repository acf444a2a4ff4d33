"""When responses, and the episodes that they are part of, began and ended.

All are moments of ``time.monotonic()`` in the process that drives the episodes. Engines may be on other machines, whose
clocks differ: they say how long after its request a response was made, and the moment of their answer is the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nemorl.base.process.timing import Span, Timed, TimedTurns, TurnSpan
from nemorl.types import Completion, Sample


@dataclass(frozen=True, slots=True)
class TimedSample(Sample, TimedTurns):
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
