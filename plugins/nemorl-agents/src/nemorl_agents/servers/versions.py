"""Versions of the policy's weights, in the form that servers are given them: Hugging Face folders, or tensors."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemorl.base.files.atomic import listed, remove, replacing_folder
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.model_folder import write_weights

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.weights import WeightHandle
    from torch import Tensor

    from nemorl_agents.servers.ways import Way

KEPT = 2
"""Newest folders that stay: a server may still be reading the one before."""


class Weights(Protocol):
    """One version, which stays as it is while the trainer goes on."""

    @property
    def version(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def seconds(self) -> float:
        """To write or copy it."""
        ...

    @property
    def folder(self) -> Path:
        """Its Hugging Face folder."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By Hugging Face names, in the order in which they are sent. Of folders there are none."""
        ...


@dataclass(frozen=True)
class WrittenWeights:
    """One version on disk."""

    version: int
    folder: Path
    bytes: int
    seconds: float

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {}


@dataclass(frozen=True)
class HeldWeights:
    """One version in this process's memory."""

    version: int
    tensors: Mapping[str, Tensor]
    seconds: float
    write: Callable[[int, Iterable[Mapping[str, Tensor]]], WrittenWeights]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def folder(self) -> Path:
        """Written when somebody asks for it."""
        return self.write(self.version, [self.tensors]).folder


def place_of(scratch: Path, shared: Path | None) -> Path:
    """Where the weights of a run are: in its scratch folder, or in a folder of its own in one that runs share.

    The same for all lives of a run, so that the next removes what one that was killed has left.
    """
    if shared is None:
        return scratch / "engines" / "weights"
    run = scratch.absolute()
    return shared / f"{run.parent.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"


class WeightVersions:
    """Makes versions of what a trainer publishes."""

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

    def taken(self, way: Way, handle: WeightHandle, version: int, device: str) -> Weights:
        """A version for servers that are given weights in this way.

        Raises:
            StorageError: The disk refuses; names the folder and why.
        """
        if way == "folder":
            return self.write(version, handle.buckets())
        begin = time.monotonic()
        place = device if way == "tensor" else "cpu"
        held = {
            name: tensor.detach().to(place, copy=True).contiguous()
            for bucket in handle.buckets()
            for name, tensor in bucket.items()
        }
        return HeldWeights(version, held, time.monotonic() - begin, self.write)

    def write(self, version: int, buckets: Iterable[Mapping[str, Tensor]]) -> WrittenWeights:
        """A folder of its own, whole or not at all. Old ones are removed.

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
