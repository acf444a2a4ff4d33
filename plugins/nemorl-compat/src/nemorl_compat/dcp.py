"""Reads tensors out of ``torch.distributed.checkpoint`` folders without running any code that is in them.

torch unpickles the index of such a folder (``.metadata``) with all that pickle may do. Here it may name the classes
that an index is made of, and nothing else; the tensors themselves torch reads with ``weights_only``.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nemorl.errors import CheckpointError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.storage import StorageReader

INDEX = ".metadata"
PARTS_OF_AN_INDEX = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                *("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
                *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # megatron-core keeps the plans of all ranks there, to save again without asking for them.
        *(
            ("torch.distributed.checkpoint.planner", name)
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("collections", "OrderedDict"),
    }
)
"""(module, name) of what an index is made of, besides torch's dtypes."""


class _MegatronIndex(Metadata):
    """That of some versions of megatron-core, with tables of its own besides."""


class _MegatronPlan(SavePlan):
    """Likewise."""


OF_MEGATRON = {
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _MegatronIndex,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _MegatronPlan,
}
"""What is made of its classes, which need not be installed."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in OF_MEGATRON:
            return OF_MEGATRON[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in PARTS_OF_AN_INDEX:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """torch's reader of ``.distcp`` files, whose index runs no code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / INDEX
        try:
            with file.open("rb") as stream:
                found = _IndexUnpickler(stream).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(f"{file} cannot be read: {error}", fix="give a checkpoint that is whole") from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{file} is no index of a checkpoint", fix="give a checkpoint that is whole")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        for place in (found.storage_data or {}).values():
            if Path(place.relative_path).name != str(place.relative_path):
                raise CheckpointError(f"{file} points outside its folder: {place.relative_path}", fix="do not use it")
        return found


def reader_of(folder: Path) -> StorageReader:
    """The reader of a folder: by its index, or by the headers of safetensors files that ranks wrote."""
    return SafeReader(folder) if (folder / INDEX).is_file() else HuggingFaceStorageReader(str(folder))


def entries(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Every tensor in a checkpoint: its whole size, and its type."""
    found = reader_of(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def read_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill whole tensors in place, in one process, however many ranks wrote them.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the intent is to load in a single process.*")
        try:
            load_distributed(dict(tensors), storage_reader=reader_of(folder), no_dist=True)
        except CheckpointException as error:  # a BaseException, with the cause of each rank apart
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{folder} cannot be read: {cause}", fix="give a checkpoint that is whole") from cause
