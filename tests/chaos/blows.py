"""What befalls a run from outside: its processes are killed or stand still, its disk fills, its clock jumps.

A schedule follows from a seed alone; a blow falls so many seconds after a step of that life began.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from nemorl_rl.callbacks import Callback
from wires import tell

BALLAST = "ballast"
"""The file that fills the disk, beside the run."""
LONGEST_DELAY_S = 0.15
SEARCH_S = 5.0
"""How long a process that is to be struck is looked for."""
LOCAL = ("kill driver", "kill driver", "kill driver", "clock jump", "slow disk", "full disk")
ON_RAY = (
    *("kill driver", "kill trainer", "kill trainer", "kill generator", "kill generator"),
    *("freeze trainer", "freeze generator", "kill raylet", "kill gcs_server", "clock jump"),
)
AT_ONCE = ("driver", "wire", "disk", "node")
"""What is there before the first step."""
CUTS_S = (0.2, 0.5, 1.0, 2.0, 15.0)
"""Of a wire. The longest is beyond all deadlines of the subjects."""
NODE_CUTS_S = (1, 3, 8, 60)
"""After the longest the node counts as lost."""


@dataclass(frozen=True)
class Blow:
    """What falls ``delay_s`` seconds after the ``step``-th step of a life began; of step 0, after the life began."""

    what: str
    step: int
    delay_s: float
    amount: float = 0
    """Seconds, of a drained node those left to it; of a slow disk, microseconds per operation."""
    pick: float = 0.0
    """Which of several processes, from 0 to 1."""


def schedule(seed: int, kinds: Sequence[str], subject: str = "") -> list[list[Blow]]:
    """The blows of the lives of a run, one list for each; the life after them is left in peace."""
    dice = random.Random(f"{subject} {seed}")
    return [[_blow(dice, kinds) for _ in range(dice.choice((1, 1, 2)))] for _ in range(dice.randint(1, 3))]


def _blow(dice: random.Random, kinds: Sequence[str]) -> Blow:
    what = dice.choice(kinds)
    amounts = {
        "clock jump": dice.choice((-1, 1)) * 10 ** dice.randint(1, 7),
        "slow disk": dice.randint(100, 5_000),
        "cut wire": dice.choice(CUTS_S),
        "reset wire": dice.choice(CUTS_S),
        "cut node": dice.choice(NODE_CUTS_S),
        "freeze node": dice.choice(NODE_CUTS_S),
        "drain node": dice.choice((1, 5, 10)),
    }
    step = dice.choice((0, 1, 1, 2, 2, 3)) if what.partition(" ")[2] in AT_ONCE else dice.randint(1, 3)
    delay_s = round(dice.uniform(0.0, LONGEST_DELAY_S), 4)
    return Blow(what, step, delay_s, amounts.get(what, 0), round(dice.random(), 3))


class Strikes(Callback):
    """Lets the blows of one life fall, and notes each that did."""

    def __init__(self, blows: Sequence[Blow], noted: Path, place: Path, control: str) -> None:
        """
        Args:
            blows: Of this life.
            noted: File of those that fell.
            place: The run's folder.
            control: Of the wire between the run and its server, if it has one.
        """
        self.blows, self.noted, self.place, self.control, self.begun = blows, noted, place, control, 0
        self.timers: list[threading.Timer] = []
        self._begin(None)

    def on_step_begin(self, trainer: Any, step: int) -> None:
        self.begun += 1
        self._begin(trainer, is_last=step == trainer.config.max_steps)

    def on_fit_end(self) -> None:
        """A run is not over before its blows have fallen."""
        for timer in self.timers:
            timer.join()

    def _begin(self, trainer: Any, *, is_last: bool = False) -> None:
        """A life that goes on late has fewer steps than were drawn from: what is left falls in its last."""
        for blow in self.blows:
            if blow.step == self.begun or (is_last and blow.step > self.begun):
                timer = threading.Timer(blow.delay_s, self._strike, (blow, trainer))
                timer.daemon = True
                self.timers.append(timer)
                timer.start()

    def _strike(self, blow: Blow, trainer: Any) -> None:
        verb, _, role = blow.what.partition(" ")
        if verb in ("kill", "freeze") and role != "node":
            pids = _pids(trainer, role, blow.pick)
            if pids:
                self._note(blow, _words_of(pids[0]) if role == "child" else "")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            return
        self._note(blow)
        if blow.what == "clock jump":
            ctypes.CDLL(None).faulty_clock_jump(ctypes.c_long(int(blow.amount)))
        elif blow.what == "slow disk":
            ctypes.CDLL(None).faulty_files_slow(int(blow.amount))
        elif role == "wire":
            tell(self.control, f"{'silence' if verb == 'cut' else 'reset'} {blow.amount}")
        elif role == "node":
            tell(self.control, f"{verb} {int(blow.pick * 1000)} {blow.amount}")
        else:
            fill_disk(self.place.parent)

    def _note(self, blow: Blow, whom: str = "") -> None:
        with self.noted.open("a") as file:
            file.write(f"{blow.what}{f' {blow.amount:g}' if blow.amount else ''}{whom}\n")


def _words_of(pid: int) -> str:
    """The end of a command, to see later who it was."""
    with suppress(psutil.Error):
        return f": {' '.join(psutil.Process(pid).cmdline()[-3:])[-60:]}"
    return ""


def _pids(trainer: Any, role: str, pick: float) -> list[int]:
    if role == "driver":
        return [os.getpid()]
    if role in ("trainer", "generator"):
        workers = (trainer.run.policy if role == "trainer" else trainer.generation).workers
        return [workers.facts[0].pid]
    end = time.monotonic() + SEARCH_S
    while time.monotonic() < end:
        below = sorted(psutil.Process().children(recursive=True), key=lambda child: child.pid)
        found = [child.pid for child in below if role == "child" or child.name() == role]
        if found:
            return [found[int(pick * len(found))]] if role == "child" else found
        time.sleep(0.01)
    return []


def fill_disk(folder: Path) -> None:
    """Leave no byte free on a disk, which had better be a small one."""
    with suppress(OSError), (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
