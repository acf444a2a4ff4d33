"""megatron-core's distributed checkpoints as safetensors files and JSON: no pickle, so reading one runs no code.

These are strategies of ``megatron.core.dist_checkpointing``, whose own (``torch_dist``) pickles metadata and common
state. A folder has ``metadata.json`` (megatron-core's: which strategies), ``common.json`` (what is no tensor),
``state-<rank>.safetensors`` and ``tensors.json``, which says which rectangle of which tensor is in which file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.serialization import load as load_sharded
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from nemorl.errors import CheckpointError
from nemorl_tensors.engines.checkpoint_files import RankFiles, TensorFile
from safetensors import safe_open
from torch import Tensor

BACKEND, COMMON_BACKEND = "nemorl_safetensors", "nemorl_json"
VERSION = 1
INDEX, COMMON = "tensors.json", "common.json"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and size along each dimension."""


def contents(tensors: ShardedStateDict, common: Mapping[str, Any]) -> RankFiles:
    """This rank's files of a checkpoint, as ``megatron.core.dist_checkpointing.save`` would write them if it had room
    for another common strategy. Collective.

    Args:
        tensors: This rank's.
        common: Equal on all ranks, what JSON can say.
    """
    tensors, common = save_preprocess({**tensors, **common})
    found = _sharded_files(tensors)
    if dist.get_rank() > 0:
        return found
    strategies = CheckpointingConfig(BACKEND, VERSION, COMMON_BACKEND, VERSION)
    texts = {COMMON: json.dumps(common) + "\n", CONFIG_FNAME: json.dumps(asdict(strategies))}
    return RankFiles(found.tensors, {**found.texts, **texts})


def load(path: Path, tensors: ShardedStateDict) -> None:
    """Fill the data of ``tensors`` in place, whatever rectangles they were written as."""
    # Several of them may ask for the same values: a weight, and the master that is its memory.
    load_sharded(tensors, str(path), validate_access_integrity=False)


def read_common(path: Path) -> dict[str, Any]:
    """The ``common`` that :func:`contents` was given.

    Raises:
        CheckpointError: The file is damaged, or not there.
    """
    with damage_named(path / COMMON):
        found: dict[str, Any] = json.loads((path / COMMON).read_text())
        return found


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[Box, int]]
    """Rectangles, and the ranks that wrote them."""


class SafetensorsSave(SaveShardedStrategy):  # type: ignore[misc]
    """Every rank writes a file of what it is the first to hold."""

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        for _ in _sharded_files(sharded_state_dict).write(Path(checkpoint_dir)):
            pass


class SafetensorsLoad(LoadShardedStrategy):  # type: ignore[misc]
    """Every rank reads what it asks for, from whichever files have it."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> ShardedStateDict:
        path = Path(checkpoint_dir)
        index = read_index(path)
        with _Files(path) as files, torch.no_grad():
            for wanted in nested_values(sharded_state_dict):
                files.fill(wanted, index[wanted.key])
        return dict_list_map_outplace(lambda wanted: wanted.data, sharded_state_dict)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """There are none: what is no tensor is common."""
        return True

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(stored.shape, dtype=getattr(torch, stored.dtype.split(".")[1]), device="meta")
            ).without_data()
            for key, stored in read_index(Path(checkpoint_dir)).items()
        }

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        _require_ours(loaded_backend, BACKEND)

    def check_version_compatibility(self, loaded_version: int) -> None:
        _require_ours(loaded_version, VERSION)


class JsonCommonLoad(LoadCommonStrategy):  # type: ignore[misc]
    """Loads the values that are no tensors."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return read_common(Path(checkpoint_dir))

    def load_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> Any:
        raise NotImplementedError("checkpoints of this format hold tensors and JSON, no pickled objects")

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        _require_ours(loaded_backend, COMMON_BACKEND)

    def check_version_compatibility(self, loaded_version: int) -> None:
        _require_ours(loaded_version, VERSION)


# So any program over megatron-core that imports this module reads such a folder with `dist_checkpointing.load`.
register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, SafetensorsSave())
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, SafetensorsLoad())
register_default_strategy(StrategyAction.LOAD_COMMON, COMMON_BACKEND, VERSION, JsonCommonLoad())


class _Files:
    """The files of a checkpoint, opened when first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._open: dict[int, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def fill(self, wanted: ShardedTensor, stored: Stored) -> None:
        """Write what is stored into ``wanted.data``; zeros where a padded dimension is longer now than it was."""
        wanted.init_data("cpu")  # where nobody brought memory
        into = wanted.data[(None,) * wanted.prepend_axis_num]
        first, size = _box(wanted)
        if wanted.allow_shape_mismatch:
            into.zero_()
        for (chunk_first, chunk_size), rank in stored.chunks:
            low = [max(a, b) for a, b in zip(first, chunk_first, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(first, size, chunk_first, chunk_size, strict=True)]
            if any(start >= stop for start, stop in zip(low, high, strict=True)):
                continue
            name = _name(wanted.key, (chunk_first, chunk_size))
            into[_slices(low, high, first)] = self._read(rank, name, _slices(low, high, chunk_first))

    def _read(self, rank: int, name: str, index: tuple[slice, ...]) -> Tensor:
        file = self._path / _state_name(rank)
        with damage_named(file):
            if rank not in self._open:
                self._open[rank] = self._stack.enter_context(safe_open(file, "pt"))
            found = self._open[rank].get_slice(name)
            # A chunk has fewer dimensions than its tensor where some were prepended, all of size 1.
            own: Tensor = found[index[len(index) - len(found.get_shape()) :]]
            return own


def read_index(path: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by name.

    Raises:
        CheckpointError: The index is damaged, or not there.
    """
    with damage_named(path / INDEX):
        return {
            key: Stored(
                entry["dtype"],
                tuple(entry["shape"]),
                [((tuple(first), tuple(size)), rank) for first, size, rank in entry["chunks"]],
            )
            for key, entry in json.loads((path / INDEX).read_text()).items()
        }


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Errors inside are the fault of this file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # safetensors has an error type of its own
        raise CheckpointError(f"{path} cannot be read: {error}", fix="resume from an earlier checkpoint") from error


def _sharded_files(tensors: ShardedStateDict) -> RankFiles:
    """The tensors that this rank is the first to hold; on rank 0 with the index of all. Collective."""
    rank = dist.get_rank()
    own = [tensor for tensor in nested_values(tensors) if is_main_replica(tensor.replica_id)]
    found = {_name(tensor.key, _box(tensor)): tensor.data.detach() for tensor in own}
    everybody: list[Any] = [None] * dist.get_world_size()
    entries = [(tensor.key, str(tensor.dtype), tensor.global_shape, _box(tensor)) for tensor in own]
    dist.all_gather_object(everybody, entries)
    files = {_state_name(rank): TensorFile(found)}
    if rank > 0:
        return RankFiles(files)
    index: dict[str, dict[str, Any]] = {}
    for writer, written in enumerate(everybody):
        for key, dtype, shape, box in written:
            entry = index.setdefault(key, {"dtype": dtype, "shape": shape, "chunks": []})
            entry["chunks"].append([*box, writer])
    _require_whole(index)
    return RankFiles(files, {INDEX: json.dumps(index) + "\n"})


def _require_whole(index: Mapping[str, Mapping[str, Any]]) -> None:
    for key, entry in index.items():
        written = sum(prod(size) for _, size, _ in entry["chunks"])
        if written != prod(entry["shape"]):
            raise CheckpointError(
                f"{written} elements of {key} would be saved, it has {prod(entry['shape'])}",
                fix="report this with the model and the parallel sizes; it is a defect of nemorl-megatron",
            )


def _require_ours(found: str | int, expected: str | int) -> None:
    if found != expected:
        raise CheckpointError(
            f"the checkpoint has the format {found}, this version of nemorl-megatron reads {expected}",
            fix="resume with the version that wrote it",
        )


def _box(tensor: ShardedTensor) -> Box:
    return tuple(tensor.global_offset), ((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))


def _name(key: str, box: Box) -> str:
    return ".".join([key, *map(str, box[0])])


def _slices(low: Iterable[int], high: Iterable[int], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _state_name(rank: int) -> str:
    return f"state-{rank:05}.safetensors"
