"""The thread that sends checkpoints, one after another, and removes replicas that are not to be kept."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.files.saving import kept_steps
from nemorl.config.run import CheckpointConfig
from nemorl.errors import CheckpointError, StorageError
from nemorl_trust.audit.recording import record

from nemorl_ops.replicate.place import Place
from nemorl_ops.replicate.transfer import CHECKPOINTS, STATE, Copied, checkpoints_in, copy_checkpoint, remove_checkpoint

if TYPE_CHECKING:
    from nemorl_ops.replicate.config import ReplicateConfig

FIRST_PAUSE_S = 1.0
"""After a failed attempt; twice as long after each further one."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one checkpoint."""

    step: int
    url: str
    bytes: int
    seconds: float
    problem: str | None = None
    """Why it has no copy."""


@dataclass(frozen=True)
class Retention:
    """Which replicas stay: the same rules as for the checkpoints of the run."""

    keep: CheckpointConfig
    metric: str
    sign: float

    def surplus(self, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Names of those that go, of manifests by name, oldest first."""
        steps = [manifest["step"] for manifest in found.values()]
        scored = [m for m in found.values() if self.metric in m["metrics"]]
        scored.sort(key=lambda m: (self.sign * m["metrics"][self.metric], m["step"]), reverse=True)
        ranked, keep = [m["step"] for m in scored], self.keep
        kept = kept_steps(steps, ranked, last=keep.keep_last, best=keep.keep_best, every=keep.keep_every)
        return [name for name, manifest in found.items() if manifest["step"] not in kept]


class Sender:
    """Sends in a thread of its own: training never waits for it but at the end of the run."""

    def __init__(self, config: ReplicateConfig, run: Path, place: Place, retention: Retention) -> None:
        self.place = place
        self.newest = 0
        """Step of the newest checkpoint that has a verified copy."""
        self.failures = 0
        self.copied = Copied()
        self._config, self._run, self._retention = config, run, retention
        self._waiting: queue.SimpleQueue[tuple[int, Path] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._gives_up = threading.Event()
        # It does not keep the process from ending: what is not copied then is said.
        self._thread = threading.Thread(target=self._work, name="nemorl-replicate", daemon=True)
        self._thread.start()

    def send(self, step: int, path: Path) -> None:
        """Have a checkpoint copied."""
        self._waiting.put((step, path))

    def outcomes(self) -> list[Outcome]:
        """Of the copies that were made or given up since the last call."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def finish(self, wait_s: float) -> bool:
        """Wait for the copies that are under way. Nothing can be sent afterwards.

        Returns:
            Whether all of them have ended.
        """
        self._waiting.put(None)
        self._thread.join(wait_s)
        self._gives_up.set()
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            self._done.put(self._outcome(*work))

    def _outcome(self, step: int, path: Path) -> Outcome:
        began, sent = time.monotonic(), self.copied.bytes
        problem: str | None = None
        for attempt in range(self._config.attempts):
            if attempt and self._gives_up.wait(FIRST_PAUSE_S * 2 ** (attempt - 1)):
                break
            try:
                self._copy(path)
            except (StorageError, CheckpointError, OSError) as error:
                problem = " ".join(str(error).split())
                if not path.is_dir():
                    problem = "it was pruned before it was sent"
                    break
            else:
                problem, self.newest = None, max(step, self.newest)
                break
        self.failures += problem is not None
        return Outcome(step, self.place.url, self.copied.bytes - sent, time.monotonic() - began, problem)

    def _copy(self, path: Path) -> None:
        source = Place(str(self._run.resolve()))
        for name in STATE:
            if (self._run / name).is_file():
                self.copied.copy_now(source, self.place, name)
        name = f"{CHECKPOINTS}/{path.name}"
        copy_checkpoint(source.sub(name), self.place.sub(name), self.copied, verify=self._config.verify)
        record("weights_copied", {"run": source.url, "to": self.place.url, "checkpoints": [path.name]})
        for other in self._retention.surplus(checkpoints_in(self.place)):
            remove_checkpoint(self.place.sub(f"{CHECKPOINTS}/{other}"))
