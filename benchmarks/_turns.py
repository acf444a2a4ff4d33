"""Two trainers in one process, one step at a time: A B A B, never both at once.

Each side runs in a thread of its own. A side's callback calls :meth:`Turns.step_done` at the end of every step, which
stops its clock, hands the turn on and blocks until the turn comes back. A recorded step is therefore the whole cycle
between two step ends: data, rollout, update, logging. Wall and process-CPU time are taken; the CPU time belongs to
the side whose turn it is, whatever helper threads it uses, because the other side is asleep.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 900.0
"""Longest wait for a turn: far above any step measured here."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of one side."""

    wall_s: float
    cpu_s: float
    facts: Mapping[str, float] = field(default_factory=dict)
    """What the side's callback knew about the step: tokens, reward, …"""


class Turns:
    """A turnstile for named sides, in the given order.

    Example:
        >>> turns = Turns("a", "b")
        >>> turns.run(a=lambda: trainer_a.fit(), b=lambda: trainer_b.train())  # doctest: +SKIP
        >>> turns.steps["a"][2:]  # doctest: +SKIP
    """

    def __init__(self, *sides: str) -> None:
        self.steps: dict[str, list[StepTime]] = {side: [] for side in sides}
        self._waiting = list(sides)
        self._turn: str | None = sides[0]
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._start = (0.0, 0.0)

    def run(self, **sides: Callable[[], Any]) -> None:
        """Run every side to its end, each in a thread of its own, so that all are in the same position.

        Raises:
            RuntimeError: a side failed; its own exception is the cause.
        """
        threads = [threading.Thread(target=self._run_side, args=(name, sides[name]), name=name) for name in self.steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise RuntimeError("a benchmarked side failed") from self._failure

    def step_done(self, side: str, **facts: float) -> None:
        """End of one step of ``side``: record it, let the others go, return when it is this side's turn again."""
        wall_s, cpu_s = (now - then for now, then in zip(_clocks(), self._start, strict=True))
        self.steps[side].append(StepTime(wall_s, cpu_s, facts))
        self._pass_on(side, leave=False)
        self._take(side)

    def _run_side(self, side: str, work: Callable[[], Any]) -> None:
        try:
            self._take(side)
            work()
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._pass_on(side, leave=True)

    def _take(self, side: str) -> None:
        with self._changed:
            ready = self._changed.wait_for(lambda: self._turn == side or self._failure, timeout=DEADLINE_S)
            if self._failure is not None:
                raise RuntimeError("the other side failed")
            if not ready:
                raise TimeoutError(f"{side!r} waited {DEADLINE_S:.0f} s for {self._turn!r} to finish a step")
            self._start = _clocks()

    def _pass_on(self, side: str, *, leave: bool) -> None:
        with self._changed:
            position = self._waiting.index(side)
            following = self._waiting[(position + 1) % len(self._waiting)]
            if leave:
                self._waiting.remove(side)
            if self._turn == side:
                self._turn = following if self._waiting else None
            self._changed.notify_all()


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
