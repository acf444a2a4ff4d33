"""Versions of the policy's weights as Hugging Face folders that servers read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl_base.files import listed, remove, replacing_folder
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.model_folder import write_weights

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from torch import Tensor

KEPT = 2
"""Newest folders that stay: a server may still be reading the one before."""


@dataclass(frozen=True)
class WrittenWeights:
    """One version on disk."""

    version: int
    folder: Path
    bytes: int
    seconds: float
    """To write it"""


def place_of(scratch: Path, shared: Path | None) -> Path:
    """Where the weights of a run are: in its scratch folder, or in a folder of its own in one that runs share.

    The same for all lives of a run, so that the next removes what one that was killed has left.
    """
    if shared is None:
        return scratch / "engines" / "weights"
    run = scratch.absolute()
    return shared / f"{run.parent.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"


class WeightFolders:
    """Writes each version into a folder of its own, whole or not at all, and removes old ones."""

    def __init__(self, parent: Path, policy: PolicyConfig) -> None:
        """
        Args:
            parent: Of this run alone. What is in it was left by a process that was killed, and is removed.
            policy: Whose weights they are.
        """
        self._parent = parent.expanduser().absolute()
        for left in listed(self._parent):
            remove(left)
        self._config = read_model_config(policy)
        self._written: list[Path] = []

    def write(self, version: int, buckets: Iterable[Mapping[str, Tensor]]) -> WrittenWeights:
        """
        Raises:
            StorageError: The disk refuses; names the folder and why.
        """
        begin, folder = time.monotonic(), self._parent / f"weights_{version:06}"
        with replacing_folder(folder) as draft:
            draft.mkdir()
            write_weights(draft, (pair for bucket in buckets for pair in bucket.items()))
            self._config.save_pretrained(draft)
        self._written = [path for path in self._written if path != folder] + [folder]
        for old in self._written[:-KEPT]:
            remove(old)
        self._written = self._written[-KEPT:]
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return WrittenWeights(version, folder, size, time.monotonic() - begin)

    def clear(self) -> None:
        """Remove what is left."""
        for folder in self._written:
            remove(folder)
        self._written = []
