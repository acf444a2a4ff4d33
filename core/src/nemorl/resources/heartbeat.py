"""Heartbeats of the ranks of a group: which of them stand still, and which of those the others wait for.

A rank that hangs holds up all others: they wait in a collective that it never enters, and nothing fails until the
collective's own time-out. So ranks are asked, beside their work, how many collectives they have entered and where they
are. A group hangs when for ``hang_timeout_s`` every rank whose answer is still due is silent or stands (the same counts
at the same line, waiting in a collective or using no processor), and one of them waits for another or is silent.

A rank that computes or writes is seen to use the processor, so a long step is none. One that is busy for ever is left
to ``worker_timeout_s``.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FrameType

from nemorl.errors import WorkerHungError

IDLE_FRAC = 0.05
"""Share of one core below which a process does nothing: its helper threads wake now and then."""
LOOKS = 6
"""Times that ranks are asked within ``hang_timeout_s``; none in calls that are shorter than one such interval."""
DEPTH = 6
"""Innermost frames shown of a rank."""
COLLECTIVE_FILES = frozenset({"distributed_c10d.py", "_functional_collectives.py"})
"""Files of torch.distributed in which a thread waits for other ranks."""
_WRAPPERS = frozenset({"wrapper", "unwrap", "trigger_wait"})

Counter = Callable[[], Mapping[str, int]]
COUNTERS: list[Counter] = []
"""Of this process: each tells how many collectives it has entered, by a name of the group that all its ranks use."""


def count_by(counter: Counter) -> None:
    """Have the heartbeats of this process carry a counter, once however often it is given."""
    if counter not in COUNTERS:
        COUNTERS.append(counter)


@dataclass(frozen=True, slots=True)
class Pulse:
    """The state of one rank at one moment."""

    counts: Mapping[str, int]
    """Collectives entered, by process group"""
    stack: tuple[str, ...]
    """Innermost frames of the thread that works on the call, the last one innermost"""
    waits_in: str
    """The collective in which a thread of it waits; empty: none"""
    cpu_s: float
    """Processor time of all its threads so far"""


def pulse_of(working: int) -> Pulse:
    """The state of this process.

    Args:
        working: The thread that works on the call, by ``threading.get_ident``.
    """
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    counts: dict[str, int] = {}
    for counter in COUNTERS:
        with suppress(Exception):  # of whoever wrote it: the rank lives all the same
            counts |= counter()
    found = next(filter(None, map(_collective, frames.values())), "")
    here = traceback.extract_stack(frames[working], limit=None)[-DEPTH:] if working in frames else []
    stack = tuple(f"{PurePath(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in here)
    return Pulse(counts, stack, found, time.process_time())


def _collective(frame: FrameType) -> str:
    """The function of torch.distributed in which a thread waits; the innermost frames may be those it calls."""
    caller: FrameType | None = frame
    for _ in range(4):
        if caller is None:
            break
        code = caller.f_code
        if PurePath(code.co_filename).name in COLLECTIVE_FILES and code.co_name not in _WRAPPERS:
            return code.co_name
        caller = caller.f_back
    return ""


@dataclass(slots=True)
class _Seen:
    """What is known of one rank."""

    heard_s: float
    stood_from_s: float
    idle_from_s: float
    last: Pulse | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """A group that stands still."""

    missing: list[int]
    """Ranks that the others wait for"""
    reports: dict[int, str]
    """Where each rank is, in words"""
    limit_s: float
    """The time that it was given"""

    def error(self, what: str, names: Mapping[int, str], log: str = "") -> WorkerHungError:
        """The loss of the group.

        Args:
            what: It was asked to do.
            names: Of its ranks.
            log: Where the log of a missing rank is, to end a sentence with.
        """
        who = ", ".join(names[rank] for rank in self.missing)
        places = "".join(f"\n    rank {rank} {report}" for rank, report in self.reports.items())
        return WorkerHungError(
            f"{what} stands still for {self.limit_s:.0f} s, held up by {who}:{places}",
            fix="look at where each rank is; raise cluster.hang_timeout_s if that takes longer, without a sign of life"
            f"{log}",
        )


@dataclass
class HangWatch:
    """Tells from the pulses of a group whether it hangs. Times are of one clock, in seconds."""

    timeout_s: float
    began_s: float
    _seen: dict[int, _Seen] = field(default_factory=dict)

    def record(self, rank: int, pulse: Pulse, now_s: float) -> None:
        """``rank`` has answered."""
        seen, before = self._of(rank), self._of(rank).last
        if before is None or (pulse.counts, pulse.stack) != (before.counts, before.stack):
            seen.stood_from_s = now_s
        if before is None or pulse.cpu_s - before.cpu_s >= IDLE_FRAC * (now_s - seen.heard_s):
            seen.idle_from_s = now_s
        seen.heard_s, seen.last = now_s, pulse

    def hang(self, pending: Collection[int], now_s: float) -> Hang | None:
        """The group's hang, if it does.

        Args:
            pending: Ranks whose answer to the call is due.
            now_s: The time.
        """
        silent = [rank for rank in pending if now_s - self._of(rank).heard_s >= self.timeout_s]
        waiting = [rank for rank in pending if rank not in silent and self._waits(rank, pending)]
        others = [rank for rank in pending if rank not in (*silent, *waiting)]
        # Beside a silent rank, one that waits on its GPU for a collective may keep a core busy with that.
        still = all(self._stands(rank, now_s, idle=rank in others and not silent) for rank in (*waiting, *others))
        if not pending or not still or not (silent or waiting):
            return None
        missing = sorted(silent) or sorted(others) or self._behind(waiting) or sorted(waiting)
        reports = {rank: self._report(rank, now_s, rank in silent) for rank in sorted(pending)}
        return Hang(missing, reports, self.timeout_s)

    def _of(self, rank: int) -> _Seen:
        return self._seen.setdefault(rank, _Seen(self.began_s, self.began_s, self.began_s))

    def _stands(self, rank: int, now_s: float, *, idle: bool) -> bool:
        seen = self._of(rank)
        since_s = max(seen.stood_from_s, seen.idle_from_s) if idle else seen.stood_from_s
        return seen.last is not None and now_s - since_s >= self.timeout_s

    def _waits(self, rank: int, pending: Collection[int]) -> bool:
        """It is in a collective, or has entered more of them than another rank of the same process group."""
        own = self._of(rank).last
        if own is None:
            return False
        if own.waits_in:
            return True
        peers = [self._of(other).last for other in pending]
        return any(_is_behind(peer, own) for peer in peers if peer is not None)

    def _behind(self, ranks: Collection[int]) -> list[int]:
        pulses = {rank: pulse for rank in ranks if (pulse := self._of(rank).last) is not None}
        return sorted(r for r, pulse in pulses.items() if any(_is_behind(pulse, peer) for peer in pulses.values()))

    def _report(self, rank: int, now_s: float, is_silent: bool) -> str:
        seen = self._of(rank)
        if is_silent or seen.last is None:
            return f"silent for {now_s - seen.heard_s:.0f} s: stopped, or in code that lets no other thread run"
        place = " < ".join(reversed(seen.last.stack)) or "between calls"
        entered = sum(seen.last.counts.values())
        doing = f"waits in {seen.last.waits_in}" if seen.last.waits_in else "is in no collective"
        return f"{doing} after {entered} collectives, at {place}"


def _is_behind(pulse: Pulse, other: Pulse) -> bool:
    """In some process group of both it has entered fewer collectives."""
    return any(count < other.counts.get(name, 0) for name, count in pulse.counts.items())
