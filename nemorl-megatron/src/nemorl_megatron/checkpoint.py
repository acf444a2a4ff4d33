"""A training checkpoint: float32 masters and moments, the position in the schedule, torch's generators.

Which rank holds what of which tensor is megatron-core's own account of its model (``sharded_state_dict``), and the
tensors are stored as it names them, a master under the name of its weight: the weight is that, rounded. Optimizer state
has the shape of its weight whatever ranges of it the ranks update, so ranks that divide the model otherwise can read
it, and each rank writes and reads its own range without asking others. How the files look: ``storage``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from nemorl.errors import CheckpointError
from nemorl_tensors.engines.checkpoint_files import RankFiles, TensorFile, random_state, restore_random_state
from safetensors.torch import load_file
from torch import Tensor

from nemorl_megatron import storage

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from nemorl_megatron.optim import Learner
    from nemorl_megatron.parallel import Parallel

Held = tuple[Tensor, list[ShardedTensor]]
"""A parameter or buffer, and the tensors of the whole model that are in it."""
STATE = "optimizer.state."
"""Before the name of a moment and that of its weight."""


def contents(held: Sequence[Held], learner: Learner, parallel: Parallel, *, with_moments: bool = True) -> RankFiles:
    """This rank's files of everything that makes the next step, over the live tensors. Collective.

    Args:
        held: Of this rank's pieces, what is to be in the checkpoint.
        learner: Their masters, moments, and the position in the schedule.
        parallel: This rank's place.
        with_moments: Also the optimizer's. Without them it is one that has made no update yet.
    """
    learner.refine()
    tensors: list[ShardedTensor] = []
    for whole, parts in held:
        if not whole.requires_grad:
            tensors += parts
        elif (share := learner.share(whole)) is not None:
            moments = share.moments() if with_moments else {}
            for prefix, values in _states(share.master, moments).items():
                tensors += _ranges(whole, parts, share.start, values, prefix, alone=learner.distributed)
    updates = learner.updates if with_moments else 0
    position = {"steps": learner.steps, "updates": updates, "rate_scale": learner.rate_scale}
    found = storage.contents({"tensors": tensors}, position)
    return RankFiles({**found.tensors, _rng_name(parallel.rank): TensorFile(random_state())}, found.texts)


def load(path: Path, held: Sequence[Held], learner: Learner, parallel: Parallel) -> None:
    """Restore what :func:`contents` saved, also by ranks that divide the model otherwise. Collective.

    Raises:
        CheckpointError: Files are missing or damaged, or are of another model.
    """
    _require_this_model(path, [part for _, parts in held for part in parts], parallel)
    position = storage.read_common(path)
    steps, updates = int(position["steps"]), int(position["updates"])
    wanted: list[ShardedTensor] = []
    for whole, parts in held:
        wanted += parts
        share = learner.share(whole)
        if share is None:
            continue
        moments = share.allocate_moments(updates)
        for prefix, values in _states(share.master, moments).items():
            wanted += _ranges(whole, parts, share.start, values, prefix)
    storage.load(path, {"tensors": wanted})
    learner.loaded(steps, updates, float(position.get("rate_scale", 1.0)))
    file = path / _rng_name(parallel.rank)
    with storage.damage_named(path):
        restore_random_state(load_file(file if file.is_file() else path / _rng_name(0)))


def held(model: Sequence[GPTModel]) -> list[Held]:
    """Every parameter and buffer of this rank's pieces."""
    found: list[Held] = []
    for piece in model:
        # Names count layers and experts over the whole model, and do not stack them.
        metadata = {"non_homogeneous_layers": True, "singleton_local_shards": True}
        tensors, _ = extract_sharded_tensors_and_factories(piece.sharded_state_dict(metadata=metadata))
        for entry in nested_values(tensors):
            found.append((entry.data, entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]))
    return found


def _states(master: Tensor, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors kept for a weight, by the prefix of its name."""
    return {"": master, **{f"{STATE}{name}.": values for name, values in moments.items()}}


def _ranges(
    whole: Tensor, parts: Sequence[ShardedTensor], start: int, values: Tensor, prefix: str, *, alone: bool = False
) -> Iterator[ShardedTensor]:
    """State of a range of a parameter's elements, as rectangles of the tensors that are in the parameter.

    Args:
        whole: The parameter.
        parts: Of it.
        start: First element, counted in memory order.
        values: One for each element of the range.
        prefix: Of their names.
        alone: No other data-parallel rank has this range.
    """
    values = values.detach().flatten()
    for part in parts:
        if not part.data.is_contiguous():
            raise CheckpointError(
                f"{part.key} lies scattered in the model's memory, and its optimizer state cannot be told apart",
                fix="set checkpoint.every: 0 for this model; its weights can be exported all the same",
            )
        first = part.data.storage_offset() - whole.storage_offset()
        low, high = max(start, first), min(start + len(values), first + part.data.numel())
        replica = (*part.replica_id[:-1], 0) if alone else part.replica_id
        for offset, size in boxes(part.local_shape, low - first, high - first):
            data = values[low - start : low - start + prod(size)].view(size)
            low += prod(size)
            yield replace(
                part,
                key=prefix + part.key,
                data=data,
                dtype=data.dtype,
                local_shape=size,
                global_offset=(
                    *part.global_offset[: part.prepend_axis_num],
                    *(a + b for a, b in zip(part.global_offset[part.prepend_axis_num :], offset, strict=True)),
                ),
                axis_fragmentations=None,
                replica_id=replica,
            )


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[storage.Box]:
    """Elements ``start`` to ``stop`` of a tensor in memory order as rectangles in that order, 2 * dimensions - 1 at
    most: the rest of a row, whole rows, the beginning of a row, and so within a row."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row

    def within(number: int, low: int, high: int) -> Iterator[storage.Box]:
        for offset, size in boxes(shape[1:], low, high):
            yield (number, *offset), (1, *size)

    if first > last:
        yield from within(last, start - last * row, stop - last * row)
        return
    yield from within(first - 1, start - (first - 1) * row, row)
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from within(last, 0, stop - last * row)


def _require_this_model(path: Path, parts: Sequence[ShardedTensor], parallel: Parallel) -> None:
    """Refuse the checkpoint of another model or backend, on all ranks alike. Collective."""
    if not (path / storage.INDEX).is_file():
        raise CheckpointError(
            f"{path} is no checkpoint of the training backend megatron: it has no {storage.INDEX}",
            fix="resume with the backend that wrote it, or start anew from its weights: `nemorl export RUN FOLDER`, "
            "then model: FOLDER",
        )
    stored = {key: entry.shape for key, entry in storage.read_index(path).items() if not key.startswith(STATE)}
    everybody: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(everybody, [(part.key, part.global_shape, part.allow_shape_mismatch) for part in parts])
    expected = {key: (shape, padded) for entries in everybody for key, shape, padded in entries}
    found = [f"{key} is missing" for key in expected if key not in stored]
    found += [f"{key} is unknown" for key in stored if key not in expected]
    found += [
        f"{key} has shape {[*stored[key]]}, here {[*shape]}"
        for key, (shape, padded) in expected.items()
        if key in stored and stored[key][padded:] != shape[padded:]
    ]
    if found:
        listed = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        raise CheckpointError(
            f"the checkpoint {path} is of another model: {listed}", fix="resume with the model it was saved with"
        )


def _rng_name(rank: int) -> str:
    return f"rng-{rank:05}.safetensors"
