"""Checkpoints and runs between two places: a manifest is copied last, and removed first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemorl.base.files.checkpoints import FORMAT
from nemorl.base.files.ownership import FILE as LOCK
from nemorl.base.files.sealed_folders import MANIFEST, is_intact
from nemorl.errors import CheckpointError, StorageError

from nemorl_ops.replicate.place import Place, copy_file

CHECKPOINTS = "checkpoints"
STATE = ("config.yaml", "environment.json", "plugins.lock.json", "metrics.jsonl", "events.jsonl")
"""Files that a run needs beside its checkpoints to be continued, or looked at."""


@dataclass
class Copied:
    """Sums over what was copied."""

    files: int = 0
    bytes: int = 0
    same: int = 0
    """Files that were there already."""
    progress: Callable[[str, int], None] = field(default=lambda _name, _sent: None, repr=False)
    """Told the file that is being sent, and the bytes sent so far."""

    def copy(
        self, source: Place, target: Place, name: str, *, recorded: str | None = None, verify: bool = True
    ) -> None:
        """One file, unless the same is there."""

        def seen(sent: int) -> None:
            self.bytes += sent
            self.progress(f"{target.url}/{name}", self.bytes)

        if copy_file(source, target, name, seen, recorded=recorded, verify=verify):
            self.files += 1
        else:
            self.same += 1

    def copy_now(self, source: Place, target: Place, name: str) -> None:
        """One small file as it is at this moment, though it may be growing."""
        content = b"".join(source.pieces(name))
        sent = target.write(name, iter([content]), lambda _: None)
        if target.digest(name) != sent:
            raise StorageError(f"{target.url}/{name} is not what was sent", fix="copy it again")
        self.bytes += len(content)


def checkpoints_in(run: Place) -> dict[str, dict[str, Any]]:
    """The manifests of the checkpoints of a run, by the name of their folder, oldest first; without those that are not
    whole."""
    ending = f"/{MANIFEST}"
    folder = run.sub(CHECKPOINTS)
    names = [name.removesuffix(ending) for name in folder.names() if name.endswith(ending) and name.count("/") == 1]
    found = {name: folder.read_json(f"{name}{ending}") for name in names if name.startswith("step_")}
    whole = {name: manifest for name, manifest in found.items() if is_whole(manifest)}
    return dict(sorted(whole.items(), key=lambda item: item[1]["step"]))


def is_whole(manifest: Any) -> bool:
    """It is a manifest of a checkpoint, as it was written."""
    return (
        isinstance(manifest, dict)
        and manifest.get("format") == FORMAT
        and type(manifest.get("step")) is int
        and isinstance(manifest.get("metrics"), dict)
        and is_intact(manifest)
    )


def copy_checkpoint(source: Place, target: Place, copied: Copied, *, verify: bool = True) -> None:
    """All files of a checkpoint whose manifest is sound, its manifest last.

    Raises:
        CheckpointError: It is no whole checkpoint.
        StorageError: A file is damaged, or did not arrive as it was sent.
    """
    manifest = source.read_json(MANIFEST)
    if not is_whole(manifest):
        raise CheckpointError(f"{source.url} is no whole checkpoint", fix="copy another one of the run")
    if target.size(MANIFEST) is not None and target.read_json(MANIFEST) != manifest:
        target.remove(MANIFEST)  # of other content, or cut: nobody is to take a mixture for a checkpoint
    files: Mapping[str, str] = manifest["files"]
    for name, digest in files.items():
        copied.copy(source, target, name, recorded=digest, verify=verify)
    copied.copy(source, target, MANIFEST, verify=verify)


def remove_checkpoint(place: Place) -> None:
    """Its manifest first, so that no part of it is taken for a whole."""
    place.remove(MANIFEST)
    place.remove("")


def copy_run(source: Place, target: Place, copied: Copied, *, steps: Callable[[list[int]], list[int]]) -> list[int]:
    """A run: its other files, then checkpoints.

    Args:
        source: Its directory.
        target: The directory to be.
        copied: Counts.
        steps: Of those that there are, the ones to copy.

    Returns:
        The steps whose checkpoints are there now.
    """
    for name in source.names():
        parts = name.split("/")
        if parts[0] not in (CHECKPOINTS, LOCK, "set_aside") and not any(part.startswith(".") for part in parts):
            copied.copy(source, target, name)
    found = {manifest["step"]: name for name, manifest in checkpoints_in(source).items()}
    chosen = steps(list(found))
    for step in chosen:
        name = f"{CHECKPOINTS}/{found[step]}"
        copy_checkpoint(source.sub(name), target.sub(name), copied)
    return chosen
