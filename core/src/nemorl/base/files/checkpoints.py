"""A checkpoint on disk: atomic, verified. Safetensors and JSON only; nothing is ever unpickled.

It is a folder ``step_000100/``, which :mod:`nemorl.base.files.sealed_folders` writes as a whole or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nemorl.base.files import sealed_folders
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
        if path.name != checkpoint_name(manifest["step"]):
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


def checkpoint_name(step: int) -> str:
    """Of the folder of the checkpoint after ``step`` steps, e.g. ``step_000100``."""
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
        and all(type(value) in (int, float) and abs(value) <= sys.float_info.max for value in metrics.values())
    )
    if not is_whole or not sealed_folders.is_intact(manifest):
        raise CheckpointError(
            f"{path / sealed_folders.MANIFEST} was damaged or edited after it was written", fix="use another one"
        )
    return manifest
