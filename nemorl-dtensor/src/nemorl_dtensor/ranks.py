"""Where one rank stands among the others: the process group, the device mesh, and the few sums that cross it.

Mesh axes, outermost first: ``dp_replicate`` (copies of the sharded model), ``dp_shard`` (FSDP), ``tp`` (tensor
parallel). So data-parallel rank = rank // tp, and the ranks of a tensor-parallel group are neighbours. Neighbours on
the axis ``dp_shard`` may share their sequences (context parallel): to FSDP they are ranks with other tokens. For
experts of a mixture ``dp_shard`` and ``tp`` together are two other axes: ``edp`` (ranks with the same ones) and ``ep``
(neighbours that divide them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from nemorl.errors import BackendError
from nemorl_tensors.engines.collectives import count_collectives
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from nemorl.resources.worker import WorkerContext

AXES = ("dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("dp_replicate", "edp", "ep")


@dataclass(frozen=True)
class Ranks:
    """The mesh of a training group of more than one rank."""

    mesh: DeviceMesh
    rank: int
    experts: DeviceMesh | None = None
    """The same ranks with axes ``edp`` and ``ep`` in place of ``dp_shard`` and ``tp``, where experts are divided"""
    context: dist.ProcessGroup | None = None
    """The ranks that share the tokens of this rank's rows, in the order of their slices; ``None``: it has whole ones"""
    parameters_on_host: bool = False
    """They lie in the host's memory, and FSDP2 gathers them from there."""
    shares_group: bool = False
    """The process group is another model's of this process, which ends it."""

    @classmethod
    def join(
        cls,
        worker: WorkerContext,
        *,
        tensor_parallel: int,
        replicas: int,
        expert_parallel: int = 1,
        context_parallel: int = 1,
        parameters_on_host: bool = False,
    ) -> Ranks:
        """Meet the other ranks, if there are any. Collective.

        Raises:
            BackendError: the sizes do not divide, or somebody does not come in time.
        """
        shards, rest = divmod(worker.world_size, tensor_parallel * replicas)
        if rest or shards % context_parallel:
            raise BackendError(
                f"{worker.world_size} workers cannot form {replicas} replicas of {context_parallel} context-parallel * "
                f"{tensor_parallel} tensor-parallel ranks",
                fix="make the number of workers a multiple of data_parallel_replicas * context_parallel_size * "
                "tensor_parallel_size",
            )
        members = shards * tensor_parallel
        if members % expert_parallel:
            raise BackendError(
                f"{members} ranks of a replica cannot divide experts {expert_parallel} ways",
                fix="make policy.backend.expert_parallel_size a divisor of the number of workers per replica",
            )
        kind = torch.device(worker.device).type
        alone = worker.world_size == 1
        shares_group = alone and dist.is_initialized()
        try:
            if not shares_group:
                dist.init_process_group(
                    "nccl" if kind == "cuda" else "gloo",
                    init_method=None if alone else f"tcp://{worker.master_address}:{worker.master_port}",
                    store=HashStore() if alone else None,
                    rank=worker.rank,
                    world_size=worker.world_size,
                    timeout=timedelta(seconds=worker.collective_timeout_s),
                )
            mesh = init_device_mesh(kind, (replicas, shards, tensor_parallel), mesh_dim_names=AXES)
            divided = (replicas, members // expert_parallel, expert_parallel)
            experts = init_device_mesh(kind, divided, mesh_dim_names=EXPERT_AXES) if expert_parallel > 1 else None
            context = _context_group(worker, tensor_parallel, context_parallel)
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"rank {worker.rank} of {worker.world_size} waited {worker.collective_timeout_s:.0f} s at "
                f"{worker.master_address}:{worker.master_port} for the others: {error}",
                fix="look at the other ranks' logs: one of them did not start, or cannot reach that address",
            ) from error
        count_collectives()
        return cls(mesh, worker.rank, experts, context, parameters_on_host, shares_group)

    @property
    def data_parallel_size(self) -> int:
        return self.mesh["dp_replicate"].size() * self.mesh["dp_shard"].size()

    @property
    def tensor_parallel_size(self) -> int:
        return self.mesh["tp"].size()

    @property
    def context_parallel_size(self) -> int:
        return 1 if self.context is None else self.context.size()

    @property
    def expert_copies(self) -> int:
        """Ranks of a replica with the same experts, where these are divided."""
        return 1 if self.experts is None else self.experts["edp"].size()

    @property
    def routing(self) -> dist.ProcessGroup | None:
        """The ranks that share the tokens of this rank's rows where routers see them: those of its context, or those
        that cut the sequences of a mixture's layers (``sharded_mixtures``)."""
        is_cut = self.experts is not None and self.tensor_parallel_size > 1
        return self.mesh["tp"].get_group() if is_cut else self.context

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh that FSDP2 shards over: two axes where there are replicas."""
        return self.mesh["dp_replicate", "dp_shard"] if self.mesh["dp_replicate"].size() > 1 else self.mesh["dp_shard"]

    @property
    def expert_shard_mesh(self) -> DeviceMesh:
        """The mesh that FSDP2 shards divided experts over, with replicas outermost where there are any."""
        assert self.experts is not None, "experts are not divided"
        return self.experts["dp_replicate", "edp"] if self.experts["dp_replicate"].size() > 1 else self.experts["edp"]

    def largest(self, value: int) -> int:
        """The maximum of a number over all ranks."""
        found = torch.tensor(value, device=self.mesh.device_type)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def total_norm(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
        """L2 norm of the whole gradient from every rank's shards of it.

        Args:
            parameters: The model's parameters, which tell how each is laid out.
            gradients: This rank's part of their gradients, by the same names.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.mesh.device_type)
        for name, gradient in gradients.items():
            # Ranks that hold the same values would count them more than once.
            own = gradient.double().square().sum() / self._copies(parameters[name])
            squares += own.to(squares.device)  # gradients may lie in the host's memory
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def leave(self) -> None:
        """End the process group."""
        if dist.is_initialized() and not self.shares_group:
            dist.destroy_process_group()

    def _copies(self, parameter: Tensor) -> int:
        """How many ranks hold each element of a parameter."""
        if not isinstance(parameter, DTensor):
            return self.mesh.size()
        mesh = parameter.device_mesh
        shards = 1
        for axis, placement in enumerate(parameter.placements):
            if not isinstance(placement, Replicate):
                shards *= mesh.size(axis)
        return self.mesh.size() // shards


def _context_group(worker: WorkerContext, tensor: int, ways: int) -> dist.ProcessGroup | None:
    """This rank's group of ``ways`` neighbours on the axis above the tensor-parallel one. Collective."""
    if ways == 1:
        return None
    ranks = torch.arange(worker.world_size).view(-1, ways, tensor).transpose(1, 2).reshape(-1, ways).tolist()
    timeout = timedelta(seconds=worker.collective_timeout_s)
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)[0]  # type: ignore[no-untyped-call]
    return group


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_memory(tensor: Tensor) -> Tensor:
    """The tensor that a DTensor keeps this rank's part in, the same object each time; for no gradient to go through."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter's gradient, cut as the parameter is, sums over ranks carried out."""
    gradient = parameter.grad
    assert gradient is not None, "the parameter has no gradient"
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """``part``, of the shape of this rank's part of ``parameter``, as a tensor that is sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    if part.device.type != mesh.device_type:  # ``from_local`` would copy it to the device
        return as_part(part, parameter._spec)
    found: Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return found


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the device that computes with it. Collective where it is sharded."""
    tensor = on_device(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_part(part: Tensor, spec: Any) -> Tensor:
    """A DTensor over ``part``, on whichever device that is; no other rank is asked."""
    found: Tensor = DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return found


def on_device(tensor: Tensor) -> Tensor:
    """The tensor, or a copy on its mesh's devices where it lies in the host's memory."""
    if not isinstance(tensor, DTensor) or tensor._local_tensor.device.type == tensor.device_mesh.device_type:
        return tensor
    return like(tensor, tensor._local_tensor.detach().to(tensor.device_mesh.device_type))


def computing_device(tensor: Tensor) -> torch.device:
    """Of the device that computes with a parameter, wherever it lies between."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


def offsets(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part of a tensor begins, in every dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets)
