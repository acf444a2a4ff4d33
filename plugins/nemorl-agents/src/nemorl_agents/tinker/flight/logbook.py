"""Logbook: the run directory of one loop while its client drives it.

The requests of a step are on disk before anything is saved that would make the journal forget them. Metrics, records
and what hooks add come after, on another thread; what a kill keeps these from is made up from the files of requests.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemorl.contracts.display import Silence
from nemorl.metrics import values
from nemorl.plugins.hooks import Hooks
from nemorl.resumable import Progress
from nemorl.storage.fingerprints import Fingerprints
from nemorl.storage.run_directory import RunDirectory, last_step
from nemorl_cli.report.records.writing import Recorder
from nemorl_cli.report.report import Records
from nemorl_rl.alerts.config import AlertsConfig
from nemorl_trust.audit.hook import Audit

from nemorl_agents.tinker.flight.config import ClientLoopConfig
from nemorl_agents.tinker.flight.learned import Decode, learned
from nemorl_agents.tinker.flight.operations import FOLDER, Operation, read_step, recorded_steps, step_file, write_step


@dataclass
class Live:
    """What hooks read of a run."""

    console: Silence
    loggers: tuple[()] = ()
    held_out: None = None


class Logbook:
    """One loop's run. Hooks take it for the trainer, which is a client on another machine."""

    def __init__(self, path: Path, config: ClientLoopConfig, decode: Decode, tell: Callable[[str], None]) -> None:
        """
        Args:
            path: Of the run directory. One that is there is continued.
            config: Of the loop.
            decode: Token ids to text.
            tell: Told of what goes wrong.

        Raises:
            NemorlError: The directory has another config, or cannot be written.
        """
        self.config, self._decode = config, decode
        self.directory = RunDirectory(path, config, tell, resume=True)
        self.progress = Progress(step=max(recorded_steps(path / FOLDER), default=0))
        self.stop_reason: str | None = None
        self.run = Live(Silence())
        saved = self.directory.checkpoints.latest()
        self._saved_step = 0 if saved is None else saved.step
        self._kept_s = time.monotonic()
        self._took_s: dict[int, float] = {}
        """Seconds from one update to the next, of steps that are not told yet"""
        self._recorder = Recorder(path, config.records, validation_every=0, decode=decode, warn=self.directory.warn)
        self.directory.logs.append(self._recorder)
        self._hooks = Hooks(self.directory.warn)
        hooks = {"audit": Audit(), "records": Records(), "alerts": AlertsConfig().build()}
        for name, hook in hooks.items():
            self._hooks.register(hook, name)
        try:
            self._begin()
        except BaseException:
            self._release()
            raise

    def _begin(self) -> None:
        self.directory.describe(Fingerprints())
        self._hooks.fire("on_build_end", trainer=self)
        told = min(last_step(self.path), self.progress.step)
        self.directory.rewind(told)
        for step in range(told + 1, self.progress.step + 1):
            try:
                self.tell(step)
            except Exception as error:
                self.directory.warn(f"step {step} has no metrics: {error}")

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def step(self) -> int:
        """Steps whose requests are on disk."""
        return self.progress.step

    @property
    def total_steps(self) -> int:
        """A client never says: so many as there are when it ends."""
        return self.progress.step if self.stop_reason is None else self.progress.step + 1

    @property
    def is_saved(self) -> bool:
        """There is a checkpoint of the last step, or there is no step."""
        return self._saved_step == self.progress.step

    def keep(self, operations: Sequence[Operation]) -> int:
        """Write the requests of the next step; returns its number."""
        step = self.progress.step + 1
        write_step(step_file(self.path, step), operations)
        now_s = time.monotonic()
        self._took_s[step], self._kept_s = max(now_s - self._kept_s, 1e-9), now_s
        self.progress.step = step
        return step

    def tell(self, step: int) -> None:
        """Metrics and records of a step that is on disk; how long it took is known in the process that it ran in."""
        found = learned(read_step(step_file(self.path, step)), step, self._decode)
        tokens, seconds = found.batch.num_tokens, self._took_s.pop(step, None)
        self.progress.tokens += tokens
        record = values(found.metrics, prefix="train/")
        if seconds is not None:
            record |= {
                "timing/train/total_step_time": seconds,
                "performance/tokens_per_sec": tokens / seconds,
                "performance/samples_per_sec": len(found.samples) / seconds,
            }
        self._hooks.fire("on_log", trainer=self, step=step, metrics=record)
        self.progress.latest.update(record)
        self.directory.metrics.write({"step": step, "time": time.time(), **record})
        self._recorder.rollout(found.samples, "train", step)
        self._recorder.batch(found.samples, [found.batch])

    def save(self, step: int, state: Path) -> None:
        """Take a training state over as the checkpoint after a step.

        Args:
            step: The last one that it has learned from.
            state: Folder of it, as the training backend writes them.
        """
        if step == self._saved_step or not state.is_dir():
            return
        trainer = {
            "algorithm": type(self.config).__name__,
            "step": step,
            "tokens": self.progress.tokens,
            "latest": self.progress.latest,
            "data": {},
            "inputs": asdict(Fingerprints()),
            "optimizer": True,
        }
        manager = self.directory.checkpoints
        manager.begin(step, {"policy": partial(linked, state)}, trainer, self.progress.latest)
        manager.publish(wait=True)
        self._saved_step = step
        self.directory.event("checkpoint", step=step)

    def stop(self, reason: str) -> None:
        """An alert asks to end the run: only its client can. It is written down."""
        self.directory.warn(reason)

    def end(self, status: Mapping[str, Any]) -> None:
        """The client is done, or gone."""
        said = status.get("reason") or {}
        reason = str(said.get("type") or status.get("type", "ended"))
        self.stop_reason = None if reason == "success" else reason
        name = "finished" if self.stop_reason is None else "stopped"
        self.directory.event(name, step=self.step, reason=self.stop_reason)
        self._recorder.flush()
        self._hooks.fire("on_fit_end", trainer=self, metrics=self.progress.latest)
        self._release()

    def close(self, reason: str) -> None:
        """Let another process have the directory: the loop goes on there, or without a record."""
        self.directory.event("stopped", step=self.step, reason=reason)
        self._release()

    def _release(self) -> None:
        self._recorder.close()
        self.directory.close()


def linked(source: Path, folder: Path) -> None:
    """Fill a folder with the files of another, which share their place on the disk where that can be."""

    def link(one: str, other: str) -> None:
        with suppress(OSError):
            Path(other).hardlink_to(one)
            return
        shutil.copy2(one, other)

    shutil.copytree(source, folder, copy_function=link, dirs_exist_ok=True)
