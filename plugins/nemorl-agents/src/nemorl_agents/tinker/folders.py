"""Folders of a server: saved states of models, snapshots to sample from, checkpoints; and the names of these."""

from __future__ import annotations

import re
from pathlib import Path

from nemorl.base.files.atomic import listed, remove
from nemorl.errors import DataError

from nemorl_agents.tinker.records import CheckpointType

SEGMENTS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""The middle of a checkpoint's path, and what it is."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def checkpoint_path(model_id: str, kind: CheckpointType, name: str) -> str:
    """``tinker://MODEL/SEGMENT/NAME``.

    Raises:
        DataError: Nothing can have this name.
    """
    if NAME.fullmatch(name) is None:
        raise DataError(
            f"a checkpoint cannot be called {name[:200]!r}", fix="letters, digits, '_', '-' and '.', 200 at most"
        )
    (segment,) = [segment for segment, each in SEGMENTS.items() if each == kind]
    return f"tinker://{model_id}/{segment}/{name}"


class Folders:
    """Where a server keeps what it writes. All names in it are made of ids of its own and of checked names."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def state(self, model_id: str, seq: int) -> Path:
        """Weights and optimizer of a model after its request ``seq``."""
        return self.root / "states" / plain(model_id) / f"{seq:08d}"

    def states(self, model_id: str) -> list[Path]:
        """All saved states of a model, also those that a server had begun to write when it was killed."""
        return listed(self.root / "states" / plain(model_id))

    def snapshot(self, model_id: str, seq: int) -> Path:
        """Weights without a name."""
        return self.root / "snapshots" / plain(model_id) / f"{seq:08d}"

    def snapshots(self, model_id: str) -> list[Path]:
        """All weights without a name of a model."""
        return listed(self.root / "snapshots" / plain(model_id))

    def checkpoint(self, model_id: str, kind: CheckpointType, name: str, seq: int) -> Path:
        """Weights with a name, of which an earlier save may still be there: each save has a folder of its own."""
        return self.root / "checkpoints" / plain(model_id) / kind / f"{name}-{seq:08d}"

    @staticmethod
    def seq_of(folder: str) -> int:
        """The request that saved a snapshot or a checkpoint, by the name of its folder."""
        return int(folder.rpartition("-")[2].rpartition("/")[2])

    def forget(self, model_id: str) -> None:
        """Remove what a model has that has no name."""
        for part in ("states", "snapshots"):
            remove(self.root / part / plain(model_id))


def folder_bytes(path: Path) -> int:
    """Sizes of the files in a folder, added up."""
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def plain(model_id: str) -> str:
    """``SESSION:train:0`` as a name that all file systems take."""
    return model_id.replace(":", ".")
