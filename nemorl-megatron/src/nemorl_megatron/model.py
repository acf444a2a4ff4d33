"""A policy as megatron-core's GPT model, in as many pieces as this rank holds of it.

Here: the model's config for megatron-core, its construction without weights, and what its forward pass returns. Not
here: layers (``layers``), the output head (``head``), weights (``bridge``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from nemorl.errors import BackendError
from torch import Tensor
from torch.nn.functional import gelu, silu

from nemorl_megatron.layers import ValueHead, block_spec
from nemorl_megatron.mtp import Ahead, mtp_block_spec
from nemorl_megatron.rope import Rotary

if TYPE_CHECKING:
    from nemorl_megatron.config import AttentionName
    from nemorl_megatron.inference import Pass
    from nemorl_megatron.packing import Packing
    from nemorl_megatron.parallel import Parallel, Sizes
    from nemorl_megatron.settings import Activation, Settings

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


class PolicyModel(GPTModel):  # type: ignore[misc]
    """The layers of one pipeline stage (or part of one), with the embedding if it is the first."""

    def __init__(
        self,
        settings: Settings,
        config: TransformerConfig,
        parallel: Parallel,
        *,
        attention: AttentionName,
        part: int | None,
    ) -> None:
        """
        Args:
            settings: Of the whole model.
            config: The same for megatron-core.
            parallel: This rank's place.
            attention: Kernel.
            part: Which part of this rank's stage, where stages have parts.
        """
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part)
        has_mtp = last and settings.mtp_layers > 0
        super().__init__(
            config,
            block_spec(settings, config, parallel.place.pipeline, part, attention),
            padded_vocabulary(settings, parallel.sizes),
            max_sequence_length=1,  # of learned positions, which there are none of
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=settings.tied and not settings.value_head,
            position_embedding_type="rope",
            mtp_block_spec=mtp_block_spec(settings, attention, config) if has_mtp else None,
            vp_stage=part,
        )
        self.gives_values = settings.value_head
        if settings.value_head and last:
            del self.output_layer
            self.value_head = ValueHead(config)
        ropes = [settings.rope] if settings.windowed_rope is None else [settings.rope, settings.windowed_rope]
        self.rotary_pos_emb = Rotary(ropes, settings.rotary, parallel.device)
        if (first or has_mtp) and settings.embedding_scale != 1:
            self.embedding.register_forward_hook(partial(_scale, settings.embedding_scale))
        _mark_parts(self)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor | None = None,
        packing: Packing | None = None,
        *,
        row_pass: Pass | None = None,
        visits: Tensor | None = None,
        ahead: Ahead | None = None,
    ) -> Tensor:
        """Rows to hidden states.

        Args:
            token_ids: [B, S] padded at the end; with sequence parallelism S is a multiple of the tensor-parallel size,
                with virtual pipeline stages every microbatch has the same shape. Stages but the first read what
                ``set_input_tensor`` gave them instead.
            position_ids: [B, S] of the tokens within their sequences; ``None``: 0 ... S - 1 in every row.
            packing: Where sequences begin, if the one row holds many.
            row_pass: Generation: where the tokens stand and what they see, in evaluation mode.
            visits: That of ``routers``, where mixtures count or replay.
            ahead: How MTP layers predict further tokens; unset: they do not.

        Returns:
            [S, B, H], of the last stage after its final norm, for ``head.OutputHead``; [S / tensor, B, H] with sequence
            parallelism. With ``ahead`` as many of each depth follow, along the first axis.
        """
        if row_pass is not None:
            positions, mask = row_pass.positions, row_pass.mask
        else:
            ids = (
                torch.arange(token_ids.shape[1], device=token_ids.device)[None]
                if position_ids is None
                else position_ids
            )
            positions, mask = ids.t(), None
        states: Tensor = super().forward(
            token_ids,
            positions,
            mask,
            inference_context=row_pass,
            packed_seq_params=packing,
            padding_mask=visits,
        )
        if ahead is None or not self.mtp_process:
            return states
        angles = self.rotary_pos_emb(positions, self.config.params_dtype)
        further = ahead.states(self, states, {"rotary_pos_emb": angles, "packed_seq_params": packing}, visits)
        return torch.cat([states, *further])

    def _preprocess(
        self, input_ids: Tensor, position_ids: Tensor, padding_mask: Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        """megatron-core has one position per column; here each token of each row has its own, [S, B]."""
        embedded = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        return embedded, self.rotary_pos_emb(position_ids, self.config.params_dtype), None, None, None, padding_mask

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        if not self.gives_values:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        # Past GPTModel's own, which has things to say of its output layer.
        return MegatronModule.sharded_state_dict(
            self, prefix, sharded_offsets, ensure_metadata_has_dp_cp_group(metadata)
        )

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """In place of logits of every token and every entry of the vocabulary, which would not fit into memory."""
        return hidden_states


def build_model(
    settings: Settings,
    parallel: Parallel,
    *,
    dtype: torch.dtype = torch.float32,
    attention: AttentionName = "auto",
    activation_checkpointing: bool = False,
    **changes: Any,
) -> list[PolicyModel]:
    """This rank's pieces of the model in evaluation mode, their memory not yet filled.

    Args:
        settings: What to build.
        parallel: This rank's place.
        dtype: Of parameters and computation.
        attention: Kernel.
        activation_checkpointing: Compute each layer's activations again in the backward pass.
        **changes: Other fields of megatron-core's ``TransformerConfig``.

    Returns:
        One piece, or one for each virtual pipeline stage.

    Raises:
        BackendError: the model cannot be divided like this.
    """
    _require_divisible(settings, parallel.sizes)
    parts = [None] if parallel.sizes.virtual_pipeline is None else range(parallel.sizes.virtual_pipeline)
    config = transformer_config(
        settings, parallel, dtype=dtype, activation_checkpointing=activation_checkpointing, **changes
    )
    pieces = [PolicyModel(settings, config, parallel, attention=attention, part=part) for part in parts]
    return [piece.to(parallel.device).eval() for piece in pieces]


def train_mode(pieces: Sequence[GPTModel], on: bool) -> None:
    """Layers recompute activations, and insist on what training needs, in training mode only. Nothing drops out."""
    for piece in pieces:
        piece.train(on)


def freeze_routers(pieces: Sequence[GPTModel]) -> None:
    """Leave the routers of mixtures as they are."""
    for piece in pieces:
        for name, parameter in piece.named_parameters():
            if name.endswith("mlp.router.weight"):
                parameter.requires_grad_(False)


def padded_vocabulary(settings: Settings, sizes: Sizes) -> int:
    """Entries of the embedding with those added that make it divide over the tensor-parallel ranks."""
    return -(-settings.vocabulary // sizes.tensor) * sizes.tensor


def transformer_config(
    settings: Settings, parallel: Parallel, *, dtype: torch.dtype, activation_checkpointing: bool, **changes: Any
) -> TransformerConfig:
    """``settings`` in megatron-core's words. Nothing drops out, and nothing is drawn: weights come from ``bridge``."""
    sizes = parallel.sizes
    fields: dict[str, Any] = {
        "num_layers": settings.layers,
        "hidden_size": settings.hidden,
        "ffn_hidden_size": settings.ffn,
        "num_attention_heads": settings.heads,
        "num_query_groups": settings.groups,
        "kv_channels": settings.head,
        "softmax_scale": settings.attention_scale,
        "normalization": "RMSNorm",
        "layernorm_epsilon": settings.norm_eps,
        "layernorm_zero_centered_gamma": settings.centered_norms,
        "qk_layernorm": settings.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": settings.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": ACTIVATIONS[settings.activation],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": torch.device(parallel.device).type == "cpu",
        "perform_initialization": False,
        **sizes.fields(),
        "sequence_parallel": sizes.sequence_parallel,
        **sizes.split.fields(sizes.pipeline),
        # Stages tell each other the shape of each microbatch. Parts of stages do not: their messages cross, and those
        # between two stages would be mistaken for one another.
        "variable_seq_lengths": sizes.virtual_pipeline is None,
        "batch_p2p_comm": sizes.virtual_pipeline is None,
        "overlap_p2p_comm": sizes.virtual_pipeline is not None,
        "moe_token_dispatcher_type": "alltoall",
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    if settings.mtp_layers:
        fields["mtp_num_layers"] = settings.mtp_layers
    if settings.window is not None:
        fields["window_size"] = (settings.window - 1, 0)
        fields["window_attn_skip_freq"] = [int(windowed) for windowed in settings.windowed]
    if activation_checkpointing:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**{**fields, **_mixture_fields(settings), **changes})


def _mixture_fields(settings: Settings) -> dict[str, Any]:
    mixture = settings.mixture
    if mixture is None:
        return {}
    fields: dict[str, Any] = {
        "num_moe_experts": mixture.experts,
        "moe_layer_freq": [int(sparse) for sparse in mixture.layers],
        "moe_ffn_hidden_size": mixture.ffn,
        "moe_router_topk": mixture.per_token,
        # A softmax over the chosen experts only is one over all, scaled up to add up to 1.
        "moe_router_pre_softmax": not mixture.renormalized,
        "moe_router_load_balancing_type": "none",
    }
    if mixture.biased:
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_dtype": "fp32",
            "moe_router_topk_scaling_factor": mixture.scale,
        }
    if mixture.shared_ffn:
        fields["moe_shared_expert_intermediate_size"] = mixture.shared_ffn
    return fields


def _require_divisible(settings: Settings, sizes: Sizes) -> None:
    sizes.layers_by_stage(settings.layers)  # says so where they do not divide
    mixture = settings.mixture
    checks = [("attention heads", settings.heads, "tensor-parallel ranks", sizes.tensor)]
    if mixture is None or not all(mixture.layers):
        checks.append(("entries of the dense intermediate size", settings.ffn, "tensor-parallel ranks", sizes.tensor))
    if settings.groups < sizes.tensor:
        # A key-value head is computed by several ranks, as many for each.
        checks.append(("tensor-parallel ranks", sizes.tensor, "key-value heads", settings.groups))
    else:
        checks.append(("key-value heads", settings.groups, "tensor-parallel ranks", sizes.tensor))
    if mixture is not None:
        checks.append(("experts", mixture.experts, "expert-parallel ranks", sizes.expert))
        checks.append(
            ("entries of an expert's intermediate size", mixture.ffn, "expert-tensor ranks", sizes.expert_tensor)
        )
    if settings.vocabulary <= padded_vocabulary(settings, sizes) // sizes.tensor * (sizes.tensor - 1):
        raise BackendError(
            f"{settings.vocabulary} tokens are too few for {sizes.tensor} tensor-parallel ranks to have some each",
            fix="lower policy.tensor_parallel_size",
        )
    for what, size, over, ways in checks:
        if size % ways:
            raise BackendError(
                f"{size} {what} of this model do not divide over {ways} {over}",
                fix="choose parallel sizes that divide the model's",
            )
    if mixture is None and sizes.expert > 1:
        raise BackendError("this model has no experts to divide", fix="set expert_parallel_size: 1")
    if mixture is not None and sizes.tensor > 1 and not sizes.sequence_parallel:
        raise BackendError(
            "mixtures of experts with tensor parallelism need the sequence divided too: their tokens are exchanged",
            fix="set sequence_parallel: true, or policy.tensor_parallel_size: 1",
        )


def _scale(factor: float, _module: Any, _args: Any, embeddings: Tensor) -> Tensor:
    """Rounded like the embeddings it multiplies, as transformers does."""
    return embeddings * torch.tensor(factor, dtype=embeddings.dtype, device=embeddings.device)


def _mark_parts(model: GPTModel) -> None:
    """Mark each weight of a parallel layer for the optimizer: whether it is divided, and among which ranks copied.

    megatron-core marks divided weights only where it draws them itself, and experts as such only where
    ``expert_parallel_size`` exceeds 1; but under tensor parallelism whole experts have other copies than other layers.
    """
    for module in model.modules():
        match module:
            case VocabParallelEmbedding() | ColumnParallelLinear():
                axis = 0
            case RowParallelLinear():
                axis = 1
            case _:
                continue
        if module.weight is None:  # an output layer that uses the embedding's
            continue
        set_tensor_model_parallel_attributes(module.weight, True, axis, 1)
        if not isinstance(module, VocabParallelEmbedding):
            module.weight.allreduce = not module.is_expert
