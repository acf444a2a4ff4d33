"""The folders in which the nodes of one attempt meet: ``attempt-0``, ``attempt-1``, …

Everything that they tell each other is a small file there. The folder is shared anyway, as that of the run is; no port
and no password is needed for it.

| file | written by | says |
|---|---|---|
| ``node-R.json`` | rank R | name, process, address |
| ``head.json`` | rank 0 | where Ray's head is |
| ``lost-R`` | rank R | its part of Ray has ended |
| ``stop`` | anybody | the run shall save and stop, and why |
| ``outcome`` | rank 0, at the end | ``finished``, ``continue``, ``cancelled`` or ``failed``, and why |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemorl.base.files.atomic import replace_text

Result = Literal["finished", "continue", "cancelled", "failed"]
CANCELLED = "cancelled"
"""First word of a request to stop after which the job is not started again."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    result: Result
    """``continue``: it was saved, or lost a node, and wants to be started again."""
    reason: str = ""


@dataclass(frozen=True)
class Attempt:
    """The folder of one attempt."""

    folder: Path

    @classmethod
    def latest(cls, part: Path) -> Attempt | None:
        """The newest attempt of a job; ``None`` before the first."""
        found = [path for path in part.glob("attempt-*") if path.name[8:].isdigit()]
        return cls(max(found, key=lambda path: int(path.name[8:]))) if found else None

    @property
    def number(self) -> int:
        return int(self.folder.name[8:])

    def request_stop(self, reason: str) -> None:
        """Ask the run to finish its step, save and stop."""
        self._write("stop", f"{reason}\n")

    @property
    def stop_reason(self) -> str | None:
        """Why somebody asked for the end; ``None``: nobody did."""
        text = self._read("stop")
        return None if text is None else text.strip() or "a request without a reason"

    def conclude(self, outcome: Outcome) -> None:
        """Say how the attempt ended, to the other nodes and to whoever started it."""
        self._write("outcome", f"{outcome.result} {' '.join(outcome.reason.split())}\n")

    @property
    def outcome(self) -> Outcome | None:
        """How the attempt ended; ``None`` while it has not."""
        result, _, reason = (self._read("outcome") or "").strip().partition(" ")
        return Outcome(result, reason) if result in ("finished", "continue", "cancelled", "failed") else None  # type: ignore[arg-type]

    def note(self, name: str, facts: dict[str, Any]) -> None:
        """Write ``NAME.json``."""
        self._write(f"{name}.json", json.dumps(facts) + "\n")

    def noted(self, name: str) -> dict[str, Any] | None:
        """The content of ``NAME.json``; ``None`` while there is none."""
        text = self._read(f"{name}.json")
        found: dict[str, Any] | None = None if text is None else json.loads(text)
        return found

    def node_name(self, rank: int) -> str:
        """The name of a node, as far as it has said it."""
        return str((self.noted(f"node-{rank}") or {}).get("name", f"of rank {rank}"))

    def report_lost(self, rank: int, reason: str) -> None:
        """Say that this node's part of Ray has ended."""
        self._write(f"lost-{rank}", f"{reason}\n")

    def lost(self) -> dict[int, str]:
        """Nodes whose part of Ray has ended, and why, by rank."""
        return {int(path.name[5:]): path.read_text().strip() for path in sorted(self.folder.glob("lost-*"))}

    def _write(self, name: str, text: str) -> None:
        replace_text(self.folder / name, text)

    def _read(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return None
