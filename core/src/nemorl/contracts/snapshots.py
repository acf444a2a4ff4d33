"""The contract of backends that write checkpoints while they train: the capability ``asynchronous_checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class SnapshottingBackend(Protocol):
    """A training backend that writes checkpoints while it trains (capability ``asynchronous_checkpoint``).

    >>> backend.snapshot_checkpoint(folder); backend.train_step(batch, loss)  # doctest: +SKIP
    >>> sorted(backend.snapshot_files(wait=True))  # doctest: +SKIP
    ['policy/model.safetensors', …]
    """

    def snapshot_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        """``save_checkpoint`` of the state as it is now. It returns when that is copied: training may go on, while a
        thread of this rank writes the copy. One at a time."""
        ...

    def snapshot_files(self, *, wait: bool) -> Mapping[str, str] | None:
        """The files of this rank's last snapshot, flushed to disk, each path with the SHA-256 of its content; ``None``
        while it is being written, unless asked to wait. Raises what kept it from being written."""
        ...
