"""Several trainers, one step at a time, each in a process of its own: A B A B, never two at once.

Separate processes keep one side's allocations, threads and patches out of the other side's figures. A side's callback
calls :meth:`Turn.step_done` at the end of every step, which stops its clock, hands the turn back and blocks until the
turn returns. A recorded step is the whole cycle between two step ends: data, rollout, update, logging.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 900.0
"""Longest wait for one step: far above any step measured here."""
ENDING_S = 30.0
"""Longest wait for the process of a side that has finished."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of one side."""

    wall_s: float
    cpu_s: float
    facts: Mapping[str, float] = field(default_factory=dict)
    """What the side's callback knew about the step: tokens, reward, …"""


class Turn:
    """What a side holds: its end of the turnstile."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._take()

    def step_done(self, **facts: float) -> None:
        """End of one step: report it, wait until it is this side's turn again."""
        wall_s, cpu_s = (now - then for now, then in zip(_clocks(), self._start, strict=True))
        self._connection.send(StepTime(wall_s, cpu_s, facts))
        self._take()

    def _take(self) -> None:
        self._connection.recv()
        self._start = _clocks()


def at_step_end(turn: Turn) -> Any:
    """A callback of nemorl that ends the turn with every step."""
    from nemorl_rl.callbacks import Callback

    class EndTurn(Callback):
        essential = True

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            turn.step_done(tokens=metrics["total_num_tokens"], loss=metrics["loss"])

    return EndTurn()


Side = Callable[[Turn], Any]
"""The work of one side: picklable, since its process starts fresh."""


def take_turns(sides: Mapping[str, Side]) -> dict[str, list[StepTime]]:
    """Run every side to its end, one step at a time in the given order.

    A side that ends leaves the turns to the others.

    Raises:
        RuntimeError: a side failed (its traceback is in the message) or took longer than the deadline.
    """
    context = multiprocessing.get_context("spawn")
    steps: dict[str, list[StepTime]] = {name: [] for name in sides}
    processes, waiting = [], {}
    try:
        for name, work in sides.items():
            waiting[name], theirs = context.Pipe()
            processes.append(context.Process(target=_run_side, args=(work, theirs), name=name, daemon=True))
            processes[-1].start()
            theirs.close()
        while waiting:
            for name, connection in list(waiting.items()):
                step = _one_turn(name, connection)
                if step is None:
                    del waiting[name]
                else:
                    steps[name].append(step)
        for process in processes:
            process.join(ENDING_S)  # a side that is cut off while it tidies up complains on stderr
    finally:
        for process in processes:
            process.terminate()
    return steps


def _one_turn(name: str, connection: Connection) -> StepTime | None:
    """Give the turn to ``name`` and take it back: its step, or ``None`` when it ended instead."""
    connection.send("go")
    if not connection.poll(DEADLINE_S):
        raise RuntimeError(f"{name!r} did not finish a step in {DEADLINE_S:.0f} s")
    try:
        answer = connection.recv()
    except EOFError:
        raise RuntimeError(f"the process of {name!r} died") from None
    if isinstance(answer, str):
        raise RuntimeError(f"{name!r} failed:\n{answer}")
    return answer


def _run_side(work: Side, connection: Connection) -> None:
    """In the side's own process: ``work``, then ``None``, or the traceback of what went wrong."""
    try:
        work(Turn(connection))
    except BaseException:
        connection.send(traceback.format_exc())
    else:
        connection.send(None)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
