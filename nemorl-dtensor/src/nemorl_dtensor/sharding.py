"""A model spread over ranks: tensor parallelism within its layers, FSDP2 around them.

Here: which module is split how, and in which order. The plan names modules, not classes, so it serves every
architecture built like Llama (Mistral, Qwen2, Qwen3, …), and mixtures whose attention is (``sharded_mixtures``); others
are refused for tensor parallelism, not for FSDP2.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import torch
from nemorl.errors import BackendError
from nemorl_rl.models.divisions import LayerSizes
from nemorl_tensors.devices import has_streams
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nemorl_dtensor.experts import divide_experts, divided_axis, stacked_experts
from nemorl_dtensor.sharded_lora import columns_plan, rows_plan
from nemorl_dtensor.sharded_mixtures import (
    DENSE,
    LATENT,
    MLP,
    attention_columns,
    beside_the_plan,
    dense_parts,
    require_cut_sequences,
    split_rest,
    whole_parts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemorl_dtensor.ranks import Ranks

SCORE = "score_rows"
"""Name of the method of the model that runs its forward pass; FSDP2 gathers and frees parameters around it."""
VALUE_HEAD = "score"
"""Where transformers' sequence classifiers have theirs."""
ROWS = ("self_attn.o_proj",)
GATES = tuple(f"{mlp}.gate_proj" for mlp in DENSE)
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Of each attention head, in the architectures that have them (Qwen3): a rank normalises its own heads."""


def shard(model: PreTrainedModel, ranks: Ranks, *, sequence_parallel: bool) -> None:
    """Spread ``model`` over the ranks. Its parameters may be on the meta device still."""
    if ranks.tensor_parallel_size > 1:
        require_cut_sequences(
            decoder_layers(model),
            sequence_parallel=sequence_parallel,
            divides_experts=ranks.experts is not None,
            shares_rows=ranks.context is not None,
        )
        _split_layers(model, ranks.mesh["tp"], sequence_parallel=sequence_parallel)
    if ranks.experts is not None:
        divide_experts(model, ranks.experts["ep"])
    if ranks.parameters_on_host:
        _fully_shard(model, ranks, CPUOffloadPolicy(pin_memory=has_streams(ranks.mesh.device_type)))
    elif ranks.data_parallel_size > 1 or ranks.expert_copies > 1:
        _fully_shard(model, ranks, OffloadPolicy())


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass leaves gathered: it would go stale when weights change."""
    if isinstance(model, FSDPModule):
        model.reshard()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of a decoder."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():  # type: ignore[no-untyped-call]
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise BackendError(
        f"{type(model).__name__} has no list of its {count} decoder layers to shard",
        fix="train it on one device, or choose another training backend",
    )


def hidden_matrices(model: PreTrainedModel) -> set[str]:
    """Names of the matrices in the repeated blocks: no embedding, head, norm, bias or stacked experts (three axes)."""
    inside = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside and parameter.ndim == 2}


def _fully_shard(model: PreTrainedModel, ranks: Ranks, offload: OffloadPolicy) -> None:
    # Gradients are summed: loss weights already divide by the tokens of the whole step, over all ranks.
    mesh, precision = ranks.shard_mesh, MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for experts in stacked_experts(model) if ranks.experts is not None else ():
        placement = partial(_divided, ranks.expert_shard_mesh["edp"].size())
        fully_shard(
            experts,
            mesh=ranks.expert_shard_mesh,
            mp_policy=precision,
            offload_policy=offload,
            shard_placement_fn=placement,
        )
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no reduction that also scales
    register_fsdp_forward_method(model, SCORE)


def _divided(shards: int, stack: nn.Parameter) -> Shard:
    return Shard(divided_axis(stack, shards))


def _split_layers(model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    layers = decoder_layers(model)
    plans = [_layer_plan(model, layer, sequence_parallel=sequence_parallel) for layer in layers]
    _require_divisible(model, layers, mesh.size())
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # None under a value head, which stays whole
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight  # type: ignore[no-untyped-call]
    states = Shard(1) if sequence_parallel else Replicate()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for layer, plan in zip(layers, plans, strict=True):
        parallelize_module(layer, mesh, plan)
        split_rest(layer, mesh)
    outer: dict[str, ParallelStyle] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if sequence_parallel:
        # Rows are cut at the first layer only: attention masks are made from the width of the embeddings.
        cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(states,), use_local_output=True)
        parallelize_module(layers[0], mesh, cut)
        outer["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(decoder, mesh, outer)
    if head is None:
        if sequence_parallel:  # a value head's own forward, which serves the check of values, sees whole rows
            gather = PrepareModuleInput(
                input_layouts=(states,), desired_input_layouts=(Replicate(),), use_local_output=True
            )
            parallelize_module(model.get_submodule(VALUE_HEAD), mesh, gather)
        _freeze(model, frozen)
        return
    # Log-probs are computed from the head's rows of the vocabulary; its own forward serves the check of them.
    parallelize_module(head, mesh, ColwiseParallel(input_layouts=states, output_layouts=Replicate()))
    if is_tied:
        head.weight = decoder.embed_tokens.weight
    _freeze(model, frozen)


def _freeze(model: PreTrainedModel, names: Collection[str]) -> None:
    """Some of torch's styles forget that a parameter is not trained."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def _layer_plan(model: PreTrainedModel, layer: nn.Module, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The parallel style of each module of a decoder layer that has parameters of its own."""
    known = dict(layer.named_modules())
    norms = [name for name, _ in layer.named_children() if name.endswith("layernorm")]
    head_norms = [name for name in HEAD_NORMS if name in known and _is_per_head(model, known[name])]
    outputs = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    dense = dense_parts(known)
    for name in (*attention_columns(known), *(f"{mlp}.{name}" for mlp in dense for name in ("gate_proj", "up_proj"))):
        plan |= columns_plan(name) if f"{name}.base_layer" in known else {name: ColwiseParallel()}
    for name in (*ROWS, *(f"{mlp}.down_proj" for mlp in dense)):
        is_adapted = f"{name}.base_layer" in known
        plan |= rows_plan(name, outputs) if is_adapted else {name: RowwiseParallel(output_layouts=outputs)}
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in norms}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=LATENT in known,  # whose ranks have the whole gradient of it
        )
        if MLP not in dense:  # each rank routes its own tokens
            plan[MLP] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True
            )
        for mlp in dense:
            plan[mlp] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    # Sequence dimension 2 is that of the heads in [R, W, heads, head size]: the gradients of all heads are added up.
    plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in head_norms}
    missing = [name for name in plan if name not in known]
    planned = {*plan, *norms, *whole_parts(layer), *beside_the_plan(known)}
    extra = [name for name, module in known.items() if [*module.parameters(recurse=False)] and name not in planned]
    if missing or extra:
        raise BackendError(
            f"{type(layer).__name__} is not built like Llama's layer ({', '.join(missing + extra)}), and tensor "
            "parallelism has no plan for it",
            fix="set policy.tensor_parallel_size: 1; FSDP shards any architecture over the workers",
        )
    return plan


def _is_per_head(model: PreTrainedModel, norm: nn.Module) -> bool:
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [parameter.numel() for parameter in norm.parameters()] == [head_size]


def _require_divisible(model: PreTrainedModel, layers: list[nn.Module], ways: int) -> None:
    config = model.config.get_text_config()
    widths = {int(module.out_features) for layer in layers for name, module in layer.named_modules() if name in GATES}  # type: ignore[arg-type]
    for width in (*sorted(widths), None):
        sizes = LayerSizes(config.num_attention_heads, config.num_key_value_heads, width, copies_key_values=False)
        if problem := sizes.problem(ways):
            raise BackendError(problem[0], fix=f"policy.tensor_parallel_size: {problem[1]}")
