"""Experts of a mixture divided over ranks: expert parallelism.

transformers 5 keeps the experts of a layer in stacks, one per matrix, with the experts along the first axis. A rank
holds E / G neighbours of each stack, as a DTensor over mesh axis ``ep``; FSDP2 divides these among the ranks that hold
the same ones, and adapters of experts (``expert_adapters``) alike. Tokens travel (``expert_dispatch``); what an expert
computes stays transformers' own grouped product.

A gradient of an expert is of the tokens of all G ranks already, since those came here; FSDP2 adds the other ranks'.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from nemorl_dtensor.expert_adapters import LowRankStack, adapted_experts, adapters_of, low_rank
from nemorl_dtensor.expert_dispatch import dispatched
from nemorl_dtensor.ranks import local

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STACKS = frozenset({"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"})
"""Names of the parameters of transformers' stacked experts."""


def stacked_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a layer, in the order of layers."""
    return [module for module in model.modules() if is_stack(module)]


def is_stack(module: nn.Module) -> bool:
    """A module holds all experts of a layer."""
    names = {name for name, parameter in module.named_parameters(recurse=False)}
    return "down_proj" in names and names <= STACKS


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of each layer, and send tokens to where theirs are.

    Args:
        model: Its parameters may be on the meta device. Not wrapped by FSDP2 yet.
        mesh: The ranks that divide the experts, one axis.

    Raises:
        BackendError: There are no experts, or they are not kept or not counted so that they can be divided.
    """
    found = stacked_experts(model)
    if not found:
        raise BackendError(
            f"{type(model).__name__} has no stacks of experts to divide",
            fix="set policy.backend.expert_parallel_size: 1, and use transformers 5 for mixtures",
        )
    for experts in found:
        _divide(experts, mesh)


def divided_axis(stack: Tensor, shards: int) -> int:
    """The axis along which FSDP2 divides a stack of a rank's experts: the experts, else the first that is even.

    Raises:
        BackendError: None is.
    """
    shape = tuple(local(stack).shape)
    axis = next((axis for axis, size in enumerate(shape) if size % shards == 0), None)
    if axis is None:
        raise BackendError(
            f"{shape[0]} experts of a rank, of shape {shape}, do not divide over {shards} ranks",
            fix="raise policy.backend.expert_parallel_size",
        )
    return axis


def _divide(experts: nn.Module, mesh: DeviceMesh) -> None:
    number, ranks = int(local(next(experts.parameters())).shape[0]), mesh.size()
    if number % ranks or "is_transposed" not in vars(experts):
        problem = f"{number} of them" if number % ranks else "transformers has no grouped product of them"
        raise BackendError(
            f"the experts of {type(experts).__name__} do not divide over {ranks} ranks: {problem}",
            fix="set policy.backend.expert_parallel_size to a divisor of the number of experts, or to 1",
        )
    plain: Any = copy.copy(experts)  # the class and settings that transformers gave it, before FSDP2 changes them
    plain.num_experts = number // ranks
    for module in (experts, *adapters_of(experts).values()):
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, _part(parameter, mesh))
    group = mesh.get_group()
    setattr(experts, "forward", partial(_forward, experts, plain, number, group))  # noqa: B010  a method of its class


def _part(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's experts of a stack."""
    size = parameter.shape[0] // mesh.size()
    first = mesh.get_local_rank() * size
    mine = parameter.detach()[first : first + size].contiguous()
    shape, stride = parameter.shape, parameter.stride()
    divided = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(divided, requires_grad=parameter.requires_grad)


def _forward(
    experts: nn.Module,
    plain: nn.Module,
    number: int,
    group: ProcessGroup,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """transformers' signature of experts; ``hidden_states`` is [T, D]."""
    stacks = {name: local(parameter) for name, parameter in experts.named_parameters(recurse=False)}
    compute = partial(_grouped, plain, stacks, low_rank(experts))
    return dispatched(hidden_states, top_k_index, top_k_weights, number, group, compute)


def _grouped(
    plain: nn.Module,
    stacks: dict[str, Tensor],
    low: Mapping[str, LowRankStack],
    states_RD: Tensor,
    experts_R: Tensor,
) -> Tensor:
    """What this rank's experts make of tokens, of which each has one, at weight 1."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    here: Any = copy.copy(plain)
    here._parameters = {}
    vars(here).update(stacks)  # local tensors, which are no parameters
    ones = torch.ones_like(experts_R, dtype=states_RD.dtype).unsqueeze(1)
    if low:
        return adapted_experts(here, low, states_RD, experts_R.unsqueeze(1), ones)
    found: Tensor = grouped_mm_experts_forward(here, states_RD, experts_R.unsqueeze(1), ones)
    return found
