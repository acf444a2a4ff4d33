"""Is an audit log whole? Every line, the chain of hashes, the seals, and the end against what its writer knew last."""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemorl_trust.audit.chain import GENESIS, Entry, SealingKey, debris_of, seal_of
from nemorl_trust.audit.log import AuditLog, State

SET_BACK_S = 60.0
"""By which an entry may be dated before an earlier one without a remark: clocks are corrected."""
MOST_MISSING = 1_000_000
"""Entries that may be missing in one place for the seals after them to be checked: each is one hash to compute."""


@dataclass(frozen=True)
class Problem:
    """Something that no writer of this log leaves behind."""

    line: int
    """Number of the line, from 1; 0: the log as a whole."""
    what: str


@dataclass
class Verdict:
    """Findings about a log."""

    path: Path
    entries: int = 0
    sealed: int = 0
    """Entries with a seal."""
    checked: int = 0
    """Seals that were verified with a key."""
    problems: list[Problem] = field(default_factory=list)
    remarks: list[Problem] = field(default_factory=list)
    """Of what an honest writer can leave as well: entries dated before earlier ones."""
    head: str = ""
    """``NUMBER:HASH`` of the last entry: kept elsewhere, it proves later that nothing up to it was changed."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        problems, remarks = ([asdict(each) for each in found] for found in (self.problems, self.remarks))
        return {
            "log": str(self.path), "ok": self.ok, "entries": self.entries, "sealed": self.sealed,
            "seals_checked": self.checked, "head": self.head, "problems": problems,
            "remarks": remarks,
        }  # fmt: skip


def entries_of(path: Path) -> Iterator[Entry]:
    """The entries of a log whose own hash is right, wherever they stand."""
    for _, line in _lines(path):
        entry = Entry.read(line)
        if entry is not None:
            yield entry


def verify(path: Path, *, key: SealingKey | None = None, head: tuple[int, str] | None = None) -> Verdict:
    """Check a log from its first line to its last.

    Args:
        path: Of the log.
        key: That sealing it gave. Unset: seals are counted, not checked.
        head: Number and hash of an entry as they were known earlier.
    """
    return _Walk(path, key, head).verdict()


class _Walk:
    """One pass over a log."""

    def __init__(self, path: Path, key: SealingKey | None, head: tuple[int, str] | None) -> None:
        self._path, self._key, self._head = path, key, head
        self._found = Verdict(path)
        self._next, self._previous = 0, GENESIS
        self._before = GENESIS
        """Hash of the entry before the last one"""
        self._debris = b""
        self._debris_line = 0
        self._latest = -math.inf
        """Time of the entry that is dated latest so far"""

    def verdict(self) -> Verdict:
        number = 0
        for number, line in _lines(self._path):
            entry = Entry.read(line)
            if entry is None:
                self._debris_line = self._debris_line or number
                self._debris += line + b"\n"
            else:
                self._entry(number, entry)
        if self._debris:
            self._say(self._debris_line, "is no entry, and no later entry accounts for it: it was changed, or cut")
        self._found.head = f"{self._next - 1}:{self._previous}" if self._next else ""
        if self._head is not None and self._head[0] >= self._next:
            self._say(0, f"entry {self._head[0]}, which was there once, is gone")
        self._end()
        return self._found

    def _entry(self, number: int, entry: Entry) -> None:
        found = self._found
        if entry.n != self._next:
            self._say(number, f"entry {entry.n} stands where entry {self._next} belongs")
        elif entry.previous != self._previous:
            self._say(number, f"entry {entry.n} does not continue the entry before it, which was changed or replaced")
        if entry.debris != (debris_of(self._debris) if self._debris else None):
            self._say(self._debris_line or number, "is no entry, and the entry after it does not account for it")
        self._debris, self._debris_line = b"", 0
        self._seal(number, entry)
        if self._head is not None and entry.n == self._head[0] and entry.hash != self._head[1]:
            self._say(number, f"entry {entry.n} is not the one that was there when its hash was noted")
        if entry.time < self._latest - SET_BACK_S:
            what = (
                f"entry {entry.n} is dated {self._latest - entry.time:.0f} s before an earlier one: a clock was wrong"
            )
            found.remarks.append(Problem(number, what))
        self._latest = max(self._latest, entry.time)
        found.entries += 1
        self._next, self._before, self._previous = entry.n + 1, entry.previous, entry.hash

    def _seal(self, number: int, entry: Entry) -> None:
        found = self._found
        if entry.seal is None:
            if found.sealed or (self._key is not None and entry.n >= self._key.n):
                self._say(number, f"entry {entry.n} has no seal, though the log is sealed")
            return
        found.sealed += 1
        if self._key is None or not 0 <= entry.n - self._key.n <= MOST_MISSING:
            return
        self._key = self._key.at(entry.n)
        if not hmac.compare_digest(seal_of(entry.hash, self._key.secret).encode(), entry.seal.encode()):
            self._say(number, f"the seal of entry {entry.n} is not of this key")
        found.checked += 1

    def _end(self) -> None:
        """Compare the end with the state, which a writer may have left one entry behind when it died."""
        state = State.read(AuditLog(self._path).state_path)
        if state is None:
            if self._next or self._key is not None:
                self._say(0, "the state file beside it is missing or damaged: entries may have been cut off the end")
            return
        if state.count > self._next:
            self._say(0, f"{state.count - self._next} entries are missing at the end")
        elif (state.count, state.hash) not in ((self._next, self._previous), (self._next - 1, self._before)):
            self._say(0, "its end is not what its writer knew: entries were added or replaced")
        if self._key is not None and not self._became(state.sealing_key):
            self._say(0, "the state file beside it does not hold what the log's key became")

    def _became(self, found: SealingKey | None) -> bool:
        """The key of a state is what this one is at that entry, or will be."""
        if found is None or self._key is None or abs(found.n - self._key.n) > 1:
            return False
        last = max(found.n, self._key.n)
        return hmac.compare_digest(found.at(last).secret, self._key.at(last).secret)

    def _say(self, line: int, what: str) -> None:
        self._found.problems.append(Problem(line, what))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, line.removesuffix(b"\n")
