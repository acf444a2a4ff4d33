"""What befalls a run from outside: its processes are killed or stand still, its disk fills, its clock jumps.

A schedule follows from a seed alone; a blow falls so many seconds after a step of that life began.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from nemorl_rl.callbacks import Callback

BALLAST = "ballast"
"""The file that fills the disk, beside the run."""
LONGEST_DELAY_S = 0.15
LOCAL = ("kill driver", "kill driver", "kill driver", "clock jump", "slow disk", "full disk")
ON_RAY = (
    *("kill driver", "kill trainer", "kill trainer", "kill generator", "kill generator"),
    *("freeze trainer", "freeze generator", "kill raylet", "kill gcs_server", "clock jump"),
)


@dataclass(frozen=True)
class Blow:
    """What falls ``delay_s`` seconds after the ``step``-th step of a life began."""

    what: str
    step: int
    delay_s: float
    amount: int = 0
    """Of a clock jump, seconds; of a slow disk, microseconds per operation."""


def schedule(seed: int, kinds: Sequence[str]) -> list[list[Blow]]:
    """The blows of the lives of a run, one list for each; the life after them is left in peace."""
    dice = random.Random(seed)
    return [[_blow(dice, kinds) for _ in range(dice.choice((1, 1, 2)))] for _ in range(dice.randint(1, 3))]


def _blow(dice: random.Random, kinds: Sequence[str]) -> Blow:
    what = dice.choice(kinds)
    amount = {"clock jump": dice.choice((-1, 1)) * 10 ** dice.randint(1, 7), "slow disk": dice.randint(100, 5_000)}
    return Blow(what, dice.randint(1, 3), round(dice.uniform(0.0, LONGEST_DELAY_S), 4), amount.get(what, 0))


class Strikes(Callback):
    """Lets the blows of one life fall, and notes each that did."""

    def __init__(self, blows: Sequence[Blow], noted: Path) -> None:
        self.blows, self.noted, self.begun = blows, noted, 0

    def on_step_begin(self, trainer: Any, step: int) -> None:
        self.begun += 1
        for blow in self.blows:
            if blow.step == self.begun:
                timer = threading.Timer(blow.delay_s, self._strike, (blow, trainer))
                timer.daemon = True
                timer.start()

    def _strike(self, blow: Blow, trainer: Any) -> None:
        verb, _, role = blow.what.partition(" ")
        if verb in ("kill", "freeze"):
            pids = _pids(trainer, role)
            self._note(blow if pids else None)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            return
        self._note(blow)
        if blow.what == "clock jump":
            ctypes.CDLL(None).faulty_clock_jump(ctypes.c_long(blow.amount))
        elif blow.what == "slow disk":
            ctypes.CDLL(None).faulty_files_slow(blow.amount)
        else:
            fill_disk(trainer.run.path.parent)

    def _note(self, blow: Blow | None) -> None:
        if blow is not None:
            with self.noted.open("a") as file:
                file.write(f"{blow.what}\n")


def _pids(trainer: Any, role: str) -> list[int]:
    if role == "driver":
        return [os.getpid()]
    if role in ("trainer", "generator"):
        workers = (trainer.run.policy if role == "trainer" else trainer.generation).workers
        return [workers.facts[0].pid]
    return [child.pid for child in psutil.Process().children(recursive=True) if child.name() == role]


def fill_disk(folder: Path) -> None:
    """Leave no byte free on a disk, which had better be a small one."""
    with suppress(OSError), (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
