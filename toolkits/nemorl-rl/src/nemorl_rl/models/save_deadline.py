"""``checkpoint.must_save_by``: a run on borrowed time ends in good order, before its job is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from nemorl.base.text.scalars import seconds
from nemorl.plugins.kinds import HookConfig

_IMPORTED_S = time.monotonic()
_START_FIELD = 19
"""Of ``/proc/self/stat`` behind the process's name: when it began, in ticks since the machine booted (proc(5))."""


class SaveDeadlineConfig(HookConfig):
    """Stops a run in time for its last checkpoint. Part of every run, listed or not."""

    summary: ClassVar[str] = "stops a run in time to save by checkpoint.must_save_by"

    def build(self) -> object:
        return SaveDeadline()


class SaveDeadline:
    """Stops the run after the last step that leaves room for no other before ``checkpoint.must_save_by``.

    A step counts from the end of one to the end of the next, validations and checkpoints in between included; the
    longest so far says how long the next may take.
    """

    essential = True

    def __init__(self, age_s: Callable[[], float] | None = None) -> None:
        """
        Args:
            age_s: Seconds since the process began. Unset: the operating system's account.
        """
        self._age_s = age_s or process_age_s
        self._limit_s: float | None = None
        self._last_s = self._longest_s = 0.0

    def on_fit_begin(self, trainer: Any) -> None:
        limit = trainer.config.checkpoint.must_save_by
        if limit is not None:
            self._limit_s, self._last_s, self._longest_s = seconds(limit), self._age_s(), 0.0

    def on_step_end(self, trainer: Any) -> None:
        if self._limit_s is None:
            return
        now_s = self._age_s()
        self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s
        if now_s + self._longest_s >= self._limit_s:
            trainer.stop(f"checkpoint.must_save_by: {trainer.config.checkpoint.must_save_by} since the process began")


def process_age_s() -> float:
    """Seconds since this process began; where the system does not say, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic() - _IMPORTED_S
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
