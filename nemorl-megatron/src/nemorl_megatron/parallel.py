"""Where one rank stands among the others: process groups of megatron-core, and who holds which part of the model.

megatron-core keeps its groups in the process (``parallel_state``), so a process has one layout at a time; a second
backend in the same process shares it. Ranks are numbered tensor parallel first, then context, data and pipeline:
neighbours share layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from nemorl.errors import BackendError
from nemorl_tensors.engines.collectives import count_collectives
from torch import Tensor

from nemorl_megatron import cpu_shim  # noqa: F401  (lets megatron-core run without CUDA; every backend comes by here)
from nemorl_megatron.stages import EVEN, Split

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.resources.worker import WorkerContext

    from nemorl_megatron.config import MegatronConfig


@dataclass(frozen=True)
class Sizes:
    """In how many parts the model and the data are divided, by kind."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    split: Split = EVEN
    """Of the layers, over the stages."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False

    @classmethod
    def of(cls, policy: TrainingOptions, config: MegatronConfig) -> Sizes:
        """The sizes that a policy and its backend ask for."""
        return cls(
            tensor=policy.tensor_parallel_size,
            pipeline=config.pipeline_parallel_size,
            virtual_pipeline=config.virtual_pipeline_parallel_size,
            split=config.split,
            context=config.context_parallel_size,
            expert=config.expert_parallel_size,
            expert_tensor=config.expert_tensor_parallel_size,
            sequence_parallel=config.sequence_parallel and policy.tensor_parallel_size > 1,
        )

    def fields(self) -> dict[str, Any]:
        """Of parallel ranks, in megatron-core's words."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
        }

    def layers_by_stage(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """[parts][stages] layers of each part of each pipeline stage.

        Raises:
            BackendError: they do not divide.
        """
        return self.split.counts(layers, self.pipeline, self.virtual_pipeline or 1)

    def data(self, world_size: int) -> int:
        """Data-parallel ranks among ``world_size``.

        Raises:
            BackendError: the parts do not divide the ranks.
        """
        dense = self.tensor * self.pipeline * self.context
        sparse = self.expert_tensor * self.expert * self.pipeline
        if world_size % dense:
            raise BackendError(
                f"{world_size} workers cannot be divided over {self.tensor} tensor-parallel * {self.pipeline} "
                f"pipeline-parallel * {self.context} context-parallel ranks",
                fix=f"make the number of workers a multiple of {dense}, or lower a parallel size",
            )
        if world_size % sparse:
            raise BackendError(
                f"{world_size} workers cannot be divided over {self.expert} expert-parallel * {self.expert_tensor} "
                f"expert-tensor-parallel * {self.pipeline} pipeline-parallel ranks",
                fix=f"make the number of workers a multiple of {sparse}, or lower a parallel size",
            )
        return world_size // dense


@dataclass(frozen=True)
class Place:
    """Which part of the model a rank holds, and which data it sees."""

    rank: int
    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True)
class Parallel:
    """This rank in the layout, and all places of it."""

    sizes: Sizes
    rank: int
    device: str
    places: tuple[Place, ...]
    """By rank."""

    @classmethod
    def join(cls, worker: WorkerContext, sizes: Sizes) -> Parallel:
        """Meet the other ranks and form the groups. Collective.

        Raises:
            BackendError: the sizes do not divide the ranks, somebody does not come in time, or this process already has
                another layout.
        """
        sizes.data(worker.world_size)
        with _explained(worker):
            if not parallel_state.model_parallel_is_initialized():
                _form_groups(worker, sizes)
            _require_same(sizes)
            places = [_this_place(worker.rank)] * worker.world_size
            dist.all_gather_object(places, places[worker.rank])
        joined = cls(sizes, worker.rank, worker.device, tuple(places))
        _JOINED.append(joined)
        return joined

    @property
    def place(self) -> Place:
        """Of this rank."""
        return self.places[self.rank]

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def data_parallel_size(self) -> int:
        return self.sizes.data(self.world_size)

    @property
    def is_last_stage(self) -> bool:
        """Whether the model's output is on this rank."""
        return self.place.pipeline == self.sizes.pipeline - 1

    @property
    def context_group(self) -> dist.ProcessGroup:
        """The ranks that share the tokens of this rank's rows."""
        group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        return group

    def largest(self, value: int) -> int:
        """The maximum of a number over all ranks. Collective."""
        found = torch.tensor(value, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def sum(self, value: int) -> int:
        """The sum of a number over all ranks. Collective."""
        found = torch.tensor(value, device=self.device)
        dist.all_reduce(found)
        return int(found)

    def from_last_stage(self, value: Any) -> Any:
        """Value on the last stage of this rank's pipeline: a tensor (of one shape on all of them, filled in place) or
        a picklable object. Collective."""
        if self.sizes.pipeline == 1:
            return value
        group = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        if isinstance(value, Tensor):
            dist.broadcast(value, last, group=group)
            return value
        box = [value]
        dist.broadcast_object_list(box, last, group=group, device=torch.device(self.device))
        return box[0]

    def leave(self) -> None:
        """The last of this process to leave ends the groups. Calling it twice is harmless.

        The default group of a process that is alone stays: an engine beside us may have made it, or use it by now.
        """
        was_here = any(other is self for other in _JOINED)
        _JOINED[:] = [other for other in _JOINED if other is not self]
        if was_here and not _JOINED:
            _dissolve_groups()
            if self.world_size > 1:
                dist.destroy_process_group()


_JOINED: list[Parallel] = []
"""Whoever uses the groups that megatron-core keeps for this process: a trainer and a generator share them."""


def _form_groups(worker: WorkerContext, sizes: Sizes) -> None:
    kind = torch.device(worker.device).type
    if kind == "cuda":
        torch.cuda.set_device(worker.device)
    alone = worker.world_size == 1
    if not (alone and _is_in_group_of_one()):
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            init_method=None if alone else f"tcp://{worker.master_address}:{worker.master_port}",
            store=dist.HashStore() if alone else None,  # type: ignore[attr-defined]
            rank=worker.rank,
            world_size=worker.world_size,
            timeout=timedelta(seconds=worker.collective_timeout_s),
        )
    parallel_state.initialize_model_parallel(
        **sizes.fields(),
        distributed_timeout_minutes=max(1, round(worker.collective_timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    count_collectives()
    # Layers ask for this state where they would drop out; nothing does.
    model_parallel_cuda_manual_seed(worker.seed, force_reset_rng=True)


def _dissolve_groups() -> None:
    """megatron-core forgets its groups and leaves them, with three threads each."""
    groups = [group for group in parallel_state._global_process_group_list if group is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)


def _is_in_group_of_one() -> bool:
    """Whether the default group of this process is there and holds nobody else. vLLM makes and leaves such a group."""
    return dist.is_initialized() and dist.get_world_size() == 1


def _require_same(sizes: Sizes) -> None:
    present = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    wanted = (
        sizes.tensor,
        sizes.pipeline,
        sizes.virtual_pipeline,
        sizes.context,
        sizes.expert,
        sizes.expert_tensor,
    )
    if present != wanted:
        raise BackendError(
            f"this process already holds a megatron model divided as {present}, another cannot be divided as {wanted} "
            "(tensor, pipeline, virtual pipeline, context, expert, expert tensor)",
            fix="give all models of the run the same parallel sizes, or use cluster.launcher: ray",
        )


def _this_place(rank: int) -> Place:
    return Place(
        rank=rank,
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
    )


@contextmanager
def _explained(worker: WorkerContext) -> Iterator[None]:
    try:
        yield
    except BackendError:
        raise
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            f"rank {worker.rank} of {worker.world_size} could not join the others at {worker.master_address}:"
            f"{worker.master_port} within {worker.collective_timeout_s:.0f} s: {error}",
            fix="look at the other ranks' logs: one of them did not start, or cannot reach that address",
        ) from error
