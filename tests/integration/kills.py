"""Processes of a run that die at random moments."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nemorl_rl.callbacks import Callback


class KillAtRandom(Callback):
    """At most one kill per step, at a random moment of it, of a random process."""

    def __init__(
        self, kills: int, every: int, seed: int, roles: Sequence[str] = ("trainer", "generator", "grader")
    ) -> None:
        self.left, self.every, self.random, self.roles = kills, every, random.Random(seed), roles
        self.done: list[str] = []
        self.last = 0

    def on_step_begin(self, trainer: Any, step: int) -> None:
        if self.left == 0 or step < self.last + self.every:
            return
        self.left, self.last = self.left - 1, step
        role = self.random.choice(self.roles)
        pid = self._pid(trainer, role)
        self.done.append(role)
        threading.Timer(self.random.uniform(0.0, 0.1), self._kill, (pid,)).start()

    def _pid(self, trainer: Any, role: str) -> int:
        if role == "grader":  # the environment lives in this process, its graders are children of it
            pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
            return self.random.choice(sorted(pids))
        workers = (trainer.run.policy if role == "trainer" else trainer.generation).workers
        pid: int = workers.facts[0].pid
        return pid

    @staticmethod
    def _kill(pid: int) -> None:
        with suppress(ProcessLookupError):  # it may have ended since
            os.kill(pid, signal.SIGKILL)
