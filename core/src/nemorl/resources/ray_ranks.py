"""One worker process of a group: where it is, what is called of it in messages, and what its log says of its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.resources.ray_actor import WorkerFacts

if TYPE_CHECKING:
    from nemorl.resources.ray_cluster import Place

LOG_LINES = 8
"""Lines of a lost worker's log shown in the error."""
LOG_CAUSE_BYTES = 100_000
"""The end of a lost worker's log in which the failure that ended it is looked for."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of the processes of a group."""

    name: str = "workers"
    """For messages and log files."""
    shards: tuple[int, ...] | None = None
    """The data-parallel shard of each rank (tensor and pipeline parallelism); unset: each has its own."""
    is_spmd: bool = True
    """All ranks form one process group and live or die together. False: independent replicas."""
    share: float = 1.0
    """Fraction of each place that this group reserves; colocated groups share places."""
    concurrent_calls: int = 1
    """Calls that one worker serves at the same time."""
    first: int = 0
    """Number of the first rank in messages and names of log files"""
    workers: int | None = None
    """Use only the first places of the cluster; unset: all."""
    places_per_worker: int = 1
    """Neighbouring places that one worker spreads over; it reserves its share of each node's first alone."""
    python: Path | None = None
    """Interpreter of the workers, when not this one's (another virtual environment)."""
    modules: tuple[str, ...] = ()
    """Modules that the workers import, looked for in ``python`` before any starts."""
    log_folder: Path | None = None
    """Folder of each rank's output; unset: Ray's own."""

    def log(self, number: int) -> Path | None:
        """Where the output of a rank goes, those before it in its place included."""
        folder = self.log_folder
        return folder and folder / f"{self.name.replace(' ', '-')}-{self.first + number}.log"


@dataclass(slots=True, eq=False)
class Rank:
    """One worker process. Its replacement is another object, so that a loss is never attributed to the wrong one."""

    number: int
    settings: GroupSettings
    actor: Any
    facts: WorkerFacts
    places: Sequence[Place]
    log_from: int
    """Bytes of its log that those before it wrote."""
    is_lost: bool = False

    @property
    def who(self) -> str:
        """Its group, number, process and node."""
        facts = self.facts
        process = f" (process {facts.pid} on {facts.host})" if facts.pid else f" ({facts.host})"
        return f"{self.settings.name} rank {self.settings.first + self.number}{process}"

    @property
    def log_end(self) -> str:
        """What this worker wrote last, and none before it."""
        log, size = self._log, log_size(self._log)
        if log is None or size <= self.log_from:
            return ""
        try:
            with log.open("rb") as file:
                file.seek(max(self.log_from, size - LOG_CAUSE_BYTES))
                return file.read().decode(errors="replace")
        except OSError as error:  # the loss is what is told
            return f"(its log cannot be read: {error.strerror})"

    @property
    def log_tail(self) -> str:
        """The last lines of its log, to end a message with."""
        lines = self.log_end.splitlines()[-LOG_LINES:]
        return "; its last output:\n" + "\n".join(f"    | {line}" for line in lines) if lines else ""

    @property
    def where_log(self) -> str:
        """Where its log is, to end a message with."""
        log = self._log
        return f"; log: {log}" if log is not None and log.is_file() else ""

    @property
    def _log(self) -> Path | None:
        return self.settings.log(self.number)


def log_size(log: Path | None) -> int:
    """Bytes of a log, if there is one."""
    return log.stat().st_size if log is not None and log.is_file() else 0
