"""The files that one rank writes of a checkpoint: at once, or in a thread over copies while training goes on.

A backend says once what is in them (:class:`TensorFile`, texts), and both ways of writing follow from that. The copies
lie in one block of host memory that is used again for every checkpoint, page-locked where tensors come from a GPU: the
time for which training stands still is that of one copy.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from nemorl.base.files.sealed_folders import digest
from safetensors.torch import save_file
from torch import Tensor

ALIGNMENT = 64
"""Bytes: of where a tensor begins in the block of copies. Any dtype may begin there."""


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file, as it is to be."""

    tensors: Mapping[str, Tensor]
    """On any device. No two share memory."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of its header."""


@dataclass(frozen=True)
class RankFiles:
    """All that one rank writes of a checkpoint, by path within its folder."""

    tensors: Mapping[str, TensorFile]
    texts: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Iterator[Path]:
        """Write them one by one; yields each as it is written. At most one file's tensors are copied at a time."""
        for name, content in self.tensors.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            here = {key: tensor.detach().cpu().contiguous() for key, tensor in content.tensors.items()}
            save_file(here, file, dict(content.metadata) or None)
            if len(content.metadata) > 1:
                _order_metadata(file)
            yield file
        for name, text in self.texts.items():
            (folder / name).write_text(text)
            yield folder / name


def _order_metadata(file: Path) -> None:
    """Sort the metadata of a safetensors file, which come in another order in every process."""
    with file.open("r+b") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:  # the same text, but for the order
            opened.seek(8)
            opened.write(text.ljust(length))


class CheckpointWriter:
    """The base of training backends that write checkpoints at once or while they train (``SnapshottingBackend``)."""

    def checkpoint_files(self, *, optimizer: bool) -> RankFiles:
        """This rank's files of a checkpoint, over the live tensors. Collective.

        Args:
            optimizer: Also its state.
        """
        raise NotImplementedError(f"{type(self).__name__} must define checkpoint_files()")

    def save_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        for _ in self.checkpoint_files(optimizer=optimizer).write(path):
            pass

    def snapshot_checkpoint(self, path: Path, *, optimizer: bool = True) -> None:
        self._background.begin(path, self.checkpoint_files(optimizer=optimizer))

    def snapshot_files(self, *, wait: bool) -> Mapping[str, str] | None:
        return self._background.files(wait=wait)

    def end_writing(self) -> None:
        """Wait for what is being written, and give the memory of its copy back."""
        self._background.close()

    @cached_property
    def _background(self) -> BackgroundWriter:
        return BackgroundWriter()


class BackgroundWriter:
    """Writes a rank's files while training goes on.

    >>> writer = BackgroundWriter()
    >>> writer.begin(folder, RankFiles({"model.safetensors": TensorFile({"w": w})}))
    >>> w.zero_()  # the file has what w was
    >>> sorted(writer.files(wait=True))
    ['…/model.safetensors']
    """

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._written: dict[str, str] = {}
        self._error: BaseException | None = None

    def begin(self, folder: Path, files: RankFiles) -> None:
        """Copy the tensors; a thread writes the copies into ``folder``. What was begun before is waited for."""
        self._join()
        copied, self._written, self._error = self._copies.of(files), {}, None
        # It does not keep the process from ending: a checkpoint that is cut short is none.
        self._thread = threading.Thread(
            target=self._write, args=(folder, copied), name="nemorl-checkpoint-writer", daemon=True
        )
        self._thread.start()

    def files(self, *, wait: bool) -> dict[str, str] | None:
        """The files that were written and flushed, with their digests; ``None`` while the thread is at work.

        Args:
            wait: Until it has ended.

        Raises:
            OSError: Or whatever else ended it.
        """
        if not wait and self._thread is not None and self._thread.is_alive():
            return None
        self._join()
        if self._error is not None:
            raise self._error
        return self._written

    def close(self) -> None:
        """Wait for the thread, and give the memory of the copies back."""
        self._join()
        self._copies.close()

    def _write(self, folder: Path, files: RankFiles) -> None:
        try:
            for file in files.write(folder):
                self._written[str(file)] = digest(file, sync=True)
        except BaseException as error:  # raised where the files are asked for
            self._error = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class HostCopies:
    """Copies of tensors in one block of host memory, which grows when it must and is used again."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    def of(self, files: RankFiles) -> RankFiles:
        """The same files over copies, valid until the next call. Returns when all are made."""
        tensors = [tensor for file in files.tensors.values() for tensor in file.tensors.values()]
        places = self._places(tensors)
        is_on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._reserve(places[-1], lock=is_on_gpu)
        slots = iter(places)

        def copied(tensor: Tensor) -> Tensor:
            begin = next(slots)
            copy = self._block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            return copy.copy_(tensor.detach(), non_blocking=True)

        found = {
            name: TensorFile({key: copied(tensor) for key, tensor in file.tensors.items()}, file.metadata)
            for name, file in files.tensors.items()
        }
        if is_on_gpu:
            torch.cuda.synchronize()
        return RankFiles(found, files.texts)

    def close(self) -> None:
        """Give the memory back."""
        if self._is_locked:
            _checked(_cuda().cudaHostUnregister(self._block.data_ptr()))
        self._block, self._is_locked = torch.empty(0, dtype=torch.uint8), False

    def _places(self, tensors: Sequence[Tensor]) -> list[int]:
        """First byte of each, and the size of all."""
        places = [0]
        for tensor in tensors:
            places.append(-(-(places[-1] + tensor.nbytes) // ALIGNMENT) * ALIGNMENT)
        return places

    def _reserve(self, size: int, *, lock: bool) -> None:
        if size <= self._block.nbytes and lock <= self._is_locked:
            return
        self.close()
        # Written once, so that the next copy meets no page that the system has yet to find.
        self._block = torch.zeros(size, dtype=torch.uint8)
        if lock:
            # Of exactly this size: torch's own page-locked memory comes in powers of two.
            _checked(_cuda().cudaHostRegister(self._block.data_ptr(), size, 0))
            self._is_locked = True


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _checked(result: Any) -> None:
    torch.cuda.check_error(int(result))


# torch's global random generators as tensors


def random_state() -> dict[str, Tensor]:
    """The state of each generator of this process, by device: ``cpu``, ``cuda.0``, …"""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Set the generators to what :func:`random_state` gave. Devices that are not here are passed over."""
    torch.set_rng_state(states["cpu"].clone())
    for name, state in states.items():
        index = name.removeprefix("cuda.")
        if index.isdecimal() and int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state.clone(), int(index))
