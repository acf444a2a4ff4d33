"""Checkpoints: atomic, verified, ranked. Safetensors and JSON only; nothing is ever unpickled.

A checkpoint is a folder ``step_000100/`` that exists once its ``manifest.json`` does. It is written under a
temporary name, every file is hashed and flushed, the manifest is written last, and one rename publishes it: a kill at
any moment leaves either the previous state or the new one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nemorl.config.run import CheckpointConfig, RunConfig
from nemorl.errors import CheckpointError

MANIFEST = "manifest.json"
REPLACED = ".replaced_"
FORMAT = 1
"""Layout version, in the manifest. A reader refuses one it does not know."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    metrics: Mapping[str, float]
    """Latest logged metrics when it was saved, for ranking."""

    def read_state(self, name: str = "trainer") -> dict[str, Any]:
        """A JSON state saved with the checkpoint."""
        state: dict[str, Any] = json.loads((self.path / f"{name}.json").read_text())
        return state

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            CheckpointError: names the first file that is missing or differs.
        """
        for name, expected in _read_manifest(self.path)["files"].items():
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"{self.path} lacks {name}", fix="use another checkpoint of this run")
            if _digest(file) != expected:
                raise CheckpointError(
                    f"{file} does not match its checksum: it was damaged or edited after it was written",
                    fix="use another checkpoint of this run",
                )


class CheckpointManager:
    """Saves, finds and prunes the checkpoints of one run."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, metric: str, higher_is_better: bool = True) -> None:
        """
        Args:
            folder: Where the checkpoints are.
            config: What to keep.
            metric: Ranks them where ``config.metric`` is unset.
            higher_is_better: Direction of ``metric``.
        """
        self.folder = folder
        self.config = config
        self.metric = config.metric or metric
        self.sign = 1.0 if (config.higher_is_better if config.metric else higher_is_better) else -1.0
        _put_back(folder)

    @classmethod
    def of_run(cls, run_dir: Path, config: RunConfig) -> Self:
        """The checkpoints of a run, ranked as its config says."""
        folder, metric = run_dir / "checkpoints", config.best_metric
        return cls(folder, config.checkpoint, metric=metric, higher_is_better=config.best_is_highest)

    def save(
        self,
        step: int,
        writers: Mapping[str, Callable[[Path], None]],
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> Checkpoint:
        """Write one checkpoint and prune old ones.

        Args:
            step: Steps completed.
            writers: Each fills its (existing, empty) folder, of the name given, with a backend's files.
            state: The trainer's JSON state.
            metrics: Latest metrics, for ranking.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step_{step:06d}"
        staging = self.folder / f".writing_{final.name}"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            for name, write in writers.items():
                (staging / name).mkdir(parents=True)
                write(staging / name)
            (staging / "trainer.json").write_text(json.dumps(state, indent=1))
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise CheckpointError(
                f"cannot write {final}: {error}", fix="free some disk space or change run_dir"
            ) from error
        files = {str(p.relative_to(staging)): _digest(p, sync=True) for p in sorted(staging.rglob("*")) if p.is_file()}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        manifest = {"format": FORMAT, "step": step, "metrics": finite, "files": files}
        _write_synced(staging / MANIFEST, json.dumps(manifest, indent=1))
        _publish(staging, final)
        self.prune()
        return Checkpoint(final, step, finite)

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first. Folders without a manifest are not checkpoints."""
        found = []
        for path in sorted(self.folder.glob("step_*")):
            if (path / MANIFEST).is_file():
                manifest = _read_manifest(path)
                found.append(Checkpoint(path, manifest["step"], manifest["metrics"]))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def best(self) -> Checkpoint | None:
        """The best by the configured metric (newer wins ties); the latest when none has the metric."""
        ranked = self._ranked()
        return ranked[0] if ranked else self.latest()

    def prune(self) -> None:
        """Keep the newest ``keep_last`` and the best ``keep_best``; remove the rest, manifest first."""
        everything = self.all()
        kept = {c.path for c in everything[-self.config.keep_last :]}
        kept |= {c.path for c in self._ranked()[: self.config.keep_best]}
        for checkpoint in everything:
            if checkpoint.path not in kept:
                (checkpoint.path / MANIFEST).unlink()
                shutil.rmtree(checkpoint.path)

    def _ranked(self) -> list[Checkpoint]:
        scored = [c for c in self.all() if self.metric in c.metrics]
        return sorted(scored, key=lambda c: (self.sign * c.metrics[self.metric], c.step), reverse=True)


def _publish(staging: Path, final: Path) -> None:
    """Make ``staging`` the checkpoint ``final``, replacing one of the same step (a re-run after a rollback)."""
    replaced = final.with_name(REPLACED + final.name)
    if final.exists():
        os.rename(final, replaced)
    os.rename(staging, final)
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    shutil.rmtree(replaced, ignore_errors=True)


def _put_back(folder: Path) -> None:
    """Undo what a kill between the two renames of ``_publish`` left behind."""
    for replaced in folder.glob(f"{REPLACED}*"):
        final = folder / replaced.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, final)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} has no readable manifest: {error}", fix="use another checkpoint") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {manifest.get('format')}, this nemorl reads {FORMAT}",
            fix="resume with the version of nemorl that wrote it (see environment.json)",
        )
    return manifest


def _digest(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
