"""Checkpoints: atomic, verified, ranked. Safetensors and JSON only; nothing is ever unpickled.

A checkpoint is a folder ``step_000100/``, which :mod:`nemorl_base.sealed_folders` writes as a whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nemorl_base import sealed_folders
from nemorl_base.files import FIXES, storage_errno

from nemorl.config.run import CheckpointConfig, RunConfig
from nemorl.errors import CheckpointError

FORMAT = 1
"""Layout version, in the manifest. A reader refuses one it does not know."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    metrics: Mapping[str, float]
    """Latest logged metrics when it was saved, for ranking."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The checkpoint in a folder, by its manifest.

        Raises:
            CheckpointError: It has no manifest, or one that is damaged, of another step or of another format.
        """
        manifest = _read_manifest(path)
        if path.name != _name(manifest["step"]):
            raise CheckpointError(f"{path} holds the checkpoint of step {manifest['step']}", fix="rename it")
        return cls(path, manifest["step"], manifest["metrics"])

    def read_state(self) -> dict[str, Any]:
        """The trainer's state.

        Raises:
            CheckpointError: There is none.
        """
        file = self.path / "trainer.json"
        state = sealed_folders.read_json(file)
        if not isinstance(state, dict):
            raise CheckpointError(f"{file} holds a {type(state).__name__}", fix="use another checkpoint of this run")
        return state

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            CheckpointError: names the first file that is missing, differs or does not belong.
        """
        sealed_folders.verify(self.path, _read_manifest(self.path)["files"])


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
        final = self.folder / _name(step)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        try:
            with sealed_folders.publishing(final, {"format": FORMAT, "step": step, "metrics": finite}) as staging:
                for name, write in writers.items():
                    (staging / name).mkdir()
                    write(staging / name)
                (staging / "trainer.json").write_text(json.dumps(state, indent=1))
            self.prune()
        except BaseException as error:  # torch reports a rank's failure as one
            number = storage_errno(error)
            if number is None:
                raise
            raise CheckpointError(f"cannot write {final}: {os.strerror(number)}", fix=FIXES[number]) from error
        return Checkpoint(final, step, finite)

    def all(self) -> list[Checkpoint]:
        """Checkpoints whose manifest is sound, oldest first. Folders without a manifest are not checkpoints."""
        return self._listed()[0]

    def damaged(self) -> dict[Path, str]:
        """Paths that are named like checkpoints and cannot be used, each with the reason."""
        return self._listed()[1]

    def latest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def best(self) -> Checkpoint | None:
        """The best by the configured metric (newer wins ties); the latest when none has the metric."""
        ranked = self._ranked()
        return ranked[0] if ranked else self.latest()

    def of_step(self, step: int) -> Checkpoint:
        """The checkpoint of a step.

        Raises:
            CheckpointError: There is none, or it is damaged; says which there are.
        """
        found, damaged = self._listed()
        for checkpoint in found:
            if checkpoint.step == step:
                return checkpoint
        others = f"there are {', '.join(str(checkpoint.step) for checkpoint in found)}" if found else "there are none"
        reason = damaged.get(self.folder / _name(step), f"{self.folder} has no checkpoint of step {step}")
        raise CheckpointError(reason, fix=f"choose another step: {others}")

    def prune(self) -> None:
        """Remove all but the newest ``keep_last``, the best ``keep_best`` and every multiple of ``keep_every``."""
        everything = self.all()
        kept = {c.path for c in everything[-self.config.keep_last :]}
        kept |= {c.path for c in self._ranked()[: self.config.keep_best]}
        if self.config.keep_every is not None:
            kept |= {c.path for c in everything if c.step % self.config.keep_every == 0}
        for checkpoint in everything:
            if checkpoint.path not in kept:
                sealed_folders.withdraw(checkpoint.path)

    def repair(self) -> None:
        """Undo a save or a removal that was cut short by a kill. Only for the owner of the run."""
        sealed_folders.repair(self.folder)

    def _listed(self) -> tuple[list[Checkpoint], dict[Path, str]]:
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder", fix="move away what is in its place")
        found, damaged = [], {}
        for path in sorted(self.folder.glob("step_*")):
            try:
                found.append(Checkpoint.read(path))
            except CheckpointError as error:
                damaged[path] = error.message
        return sorted(found, key=lambda checkpoint: checkpoint.step), damaged

    def _ranked(self) -> list[Checkpoint]:
        scored = [c for c in self.all() if self.metric in c.metrics]
        return sorted(scored, key=lambda c: (self.sign * c.metrics[self.metric], c.step), reverse=True)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = sealed_folders.read_manifest(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {manifest.get('format')}, this nemorl reads {FORMAT}",
            fix="resume with the version of nemorl that wrote it (see environment.json)",
        )
    step, metrics = manifest.get("step"), manifest.get("metrics")
    is_whole = (
        type(step) is int
        and isinstance(metrics, dict)
        and all(type(value) in (int, float) and math.isfinite(value) for value in metrics.values())
    )
    if not is_whole or not sealed_folders.is_intact(manifest):
        raise CheckpointError(
            f"{path / sealed_folders.MANIFEST} was damaged or edited after it was written", fix="use another one"
        )
    return manifest
