"""Which parts of which tensors a rank writes, by PyTorch's distributed checkpoint, which then writes nothing itself.

The ranks agree on the plan while all of them stand still; the files can be written later. They look as those of torch's
``HuggingFaceStorageWriter(save_distributed=True)``: safetensors, with the place of each part within its tensor in the
header, which ``HuggingFaceStorageReader`` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from nemorl.errors import CheckpointError
from nemorl_tensors.engines.checkpoint_files import TensorFile
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

FILE_BYTES = 4 * 2**30
"""Of whole tensors per file: while a rank writes tensors of a GPU at once, those of a file are copied."""


def planned_files(tensors: Mapping[str, Tensor]) -> dict[str, TensorFile]:
    """This rank's files of tensors, whole or sharded, by name. Collective.

    Raises:
        CheckpointError: The ranks do not agree.
    """
    if not dist.is_initialized():
        return _named([(name, tensor, [0] * tensor.ndim) for name, tensor in tensors.items()], _files(tensors), 1)
    plan = _PlanOnly(_files(tensors))
    try:
        save_distributed(dict(tensors), storage_writer=plan)
    except CheckpointException as error:  # a BaseException, with the cause of each rank apart
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"the ranks cannot agree on a checkpoint: {cause}") from cause
    return plan.found


class _PlanOnly(StorageWriter):
    """Keeps what torch asks it to write."""

    def __init__(self, files: Mapping[str, int]) -> None:
        self._files = files
        self.found: dict[str, TensorFile] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans, 1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts, results = [], []
        for item in plan.items:
            assert item.tensor_data is not None, "a checkpoint of this backend holds tensors alone"
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor)
            parts.append((item.index.fqn, part.detach(), list(item.tensor_data.chunk.offsets)))
            results.append(WriteResult(item.index, part.nbytes, None))
        self.found = _named(parts, self._files, plan.storage_data)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _named(
    parts: Sequence[tuple[str, Tensor, list[int]]], files: Mapping[str, int], shard: int
) -> dict[str, TensorFile]:
    """Files of parts of tensors: name, values, and where in the whole tensor they begin."""
    found, last = {}, max(files.values(), default=1)
    for number in sorted({files[name] for name, _, _ in parts}):
        held = [part for part in parts if files[part[0]] == number]
        offsets = {name: {"saved_offsets": begin} for name, _, begin in held}
        header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        tensors = {name: values for name, values, _ in held}
        found[f"shard-{shard:05}-model-{number:05}-of-{last:05}.safetensors"] = TensorFile(tensors, header)
    return found


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which of a rank's files each tensor goes to, from 1: the same on all ranks, as it follows from whole sizes."""
    files: dict[str, int] = {}
    total = 0
    for name, tensor in tensors.items():
        files[name] = 1 + total // FILE_BYTES
        total += tensor.numel() * tensor.element_size()
    return files
