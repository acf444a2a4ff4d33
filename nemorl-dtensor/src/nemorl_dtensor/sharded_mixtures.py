"""Tensor parallelism around the experts of a mixture: what of a layer is no Llama's.

Ranks of a tensor-parallel group cut the sequence between attention and experts (sequence parallelism), so each routes
and dispatches its own tokens, once. To experts they are ranks with other tokens, as data-parallel ones are: experts are
divided over neighbours of both kinds (``ranks``). A router is whole on each rank; its gradient is the sum over the
group. What every token passes beside its experts is split as a dense MLP is.

Latent attention (DeepSeek-V3, arXiv:2412.19437, sec. 2.1.1) is split by heads where latents become heads. What makes
the latents is whole on each rank, of all tokens, and has the same gradient on each. The rotary part of a key is one for
all heads, so that the ranks' gradients of it are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from nemorl.errors import BackendError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from nemorl_dtensor.experts import is_stack

MLP, SHARED = DENSE = ("mlp", "mlp.shared_experts")
"""Modules of a layer that may be an MLP built as Llama's, of all of its tokens."""
EXPERTS, ROUTERS = "mlp.experts", ("mlp.gate", "mlp.router")
LATENT = "self_attn.kv_a_proj_with_mqa"
"""Makes the latent of keys and values, and the rotary part of keys behind it."""
WHOLE = (LATENT, "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
"""Of latent attention"""
SINKS = "sinks"
"""Parameter of an attention with a number for each head that takes weight away from its tokens (GPT-OSS)."""


class LocalParameters(ParallelStyle):
    """A module's own parameters are spread over ranks; in its forward pass they are this rank's tensors."""

    def __init__(self, placement: Placement, gradients: Placement) -> None:
        """
        Args:
            placement: Of each parameter.
            gradients: Of the gradients that the forward pass gives: ``Partial`` where ranks have other tokens.
        """
        super().__init__()
        self._placement, self._gradients = placement, gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            spread = distribute_tensor(parameter.detach(), device_mesh, [self._placement])
            setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        setattr(module, "forward", partial(_forward, module, module.forward, self._gradients))  # noqa: B010  a method
        return module


def _forward(module: Any, forward: Callable[..., Any], gradients: Placement, *args: Any, **kwargs: Any) -> Any:
    own: Mapping[str, Any] = module._parameters
    here = {
        name: parameter.to_local(grad_placements=[gradients]) if isinstance(parameter, DTensor) else parameter
        for name, parameter in own.items()
    }
    module._parameters = {}
    vars(module).update(here)  # tensors, which are no parameters
    try:
        return forward(*args, **kwargs)
    finally:
        for name in here:
            del vars(module)[name]
        module._parameters = own


def attention_columns(known: Mapping[str, nn.Module]) -> list[str]:
    """Linear layers of a layer's attention whose outputs are those of heads."""
    if LATENT not in known:
        return [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    queries = "self_attn.q_b_proj" if "self_attn.q_b_proj" in known else "self_attn.q_proj"
    return [queries, "self_attn.kv_b_proj"]


def dense_parts(known: Mapping[str, nn.Module]) -> list[str]:
    """The MLPs of a layer that are split as Llama's."""
    of_mixture = [SHARED] if SHARED in known else []
    return of_mixture if EXPERTS in known and is_stack(known[EXPERTS]) else [MLP]


def whole_parts(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Styles, by module, of what is apart from the linear layers: routers, and sinks of attention heads."""
    known = dict(layer.named_modules())
    found: dict[str, ParallelStyle] = {}
    if EXPERTS in known:
        found |= {name: LocalParameters(Replicate(), Partial()) for name in ROUTERS if name in known}
    if LATENT in known:
        found |= {
            name: LocalParameters(Replicate(), Replicate())
            for name, module in known.items()
            if f"{name}.".startswith(tuple(f"{whole}." for whole in WHOLE)) and [*module.parameters(recurse=False)]
        }
    attention = known.get("self_attn")
    if attention is not None and [name for name, _ in attention.named_parameters(recurse=False)] == [SINKS]:
        found["self_attn"] = LocalParameters(Shard(0), Shard(0))
    return found


def split_rest(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Spread what is no linear layer of Llama's. Called once its linear layers are split."""
    parallelize_module(layer, mesh, whole_parts(layer))
    known: dict[str, Any] = dict(layer.named_modules())
    if LATENT in known:
        width, group = int(known["self_attn"].qk_rope_head_dim), mesh.get_group()
        known[LATENT].register_forward_hook(partial(_share_tail, width, group))


def _share_tail(width: int, group: dist.ProcessGroup, _module: nn.Module, _inputs: Any, made: Tensor) -> Tensor:
    found: Tensor = _SharedTail.apply(made, width, group)  # type: ignore[no-untyped-call]
    return found


class _SharedTail(torch.autograd.Function):
    """What it is given; the gradients of its last entries, which each rank has of its heads, are added up."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.group = width, group
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        first, tail = grads[0][..., : -ctx.width], grads[0][..., -ctx.width :].contiguous()
        dist.all_reduce(tail, group=ctx.group)
        return torch.cat((first, tail), -1), None, None


def beside_the_plan(known: Mapping[str, nn.Module]) -> set[str]:
    """Modules that ranks divide otherwise: experts, and their adapters."""
    return {name for name in known if name == EXPERTS or name.startswith(f"{EXPERTS}.")}


def require_cut_sequences(
    layers: list[nn.Module], *, sequence_parallel: bool, divides_experts: bool, shares_rows: bool
) -> None:
    """
    Raises:
        BackendError: Ranks of a tensor-parallel group would all dispatch the same tokens, or hold the same experts, or
            cut rows that other ranks share.
    """
    if not any(is_stack(module) for layer in layers for module in layer.modules()):
        return
    if not sequence_parallel:
        raise BackendError(
            "the ranks that share a layer of a mixture cut its tokens, and sequence_parallel is off",
            fix="set policy.backend.sequence_parallel: true",
        )
    if shares_rows:
        raise BackendError(
            "tensor, expert and context parallelism of a mixture together are not tested",
            fix="set policy.backend.context_parallel_size: 1, or policy.tensor_parallel_size: 1",
        )
    if not divides_experts:
        raise BackendError(
            "tensor parallelism divides the attention of a mixture, and its experts are not divided",
            fix="set policy.backend.expert_parallel_size to policy.tensor_parallel_size, or a multiple of it",
        )
