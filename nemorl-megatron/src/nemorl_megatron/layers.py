"""The layers that megatron-core builds the model from, chosen so that one set of weight names serves every device.

megatron-core's own parallel linear layers and mixtures of experts, with norms, attention and output norms of ours where
its local layers lack something (sequence parallelism, norms that scale by 1 + weight, Gemma's output norms). With
Transformer Engine only the attention kernel changes, so that no weight gets another name.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from nemorl.errors import BackendError
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from nemorl_megatron.attention import CoreAttention
from nemorl_megatron.rope import rotate
from nemorl_megatron.routers import MixtureLayer, Router

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemorl_megatron.config import AttentionName
    from nemorl_megatron.inference import Pass
    from nemorl_megatron.lora import Adapter
    from nemorl_megatron.settings import Settings

FULL, WINDOWED = 0, 1
"""Rows of the table of angles where there are two (``rope.Rotary``)."""


class Norm(nn.Module):
    """RMS norm of the last dimension, computed in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        # Tells megatron-core to add up the gradients of all parts of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._centered = config.layernorm_zero_centered_gamma
        self._eps = eps

    def forward(self, states: Tensor) -> Tensor:
        if self._centered:
            return rms_norm(states.float(), self.weight.shape, 1 + self.weight.float(), self._eps).type_as(states)
        # Rounded before it is scaled, as transformers does.
        return self.weight * rms_norm(states.float(), self.weight.shape, None, self._eps).type_as(states)


class ValueHead(nn.Module):
    """One number for each state; the same on all tensor-parallel ranks, which are given whole states."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device))

    def forward(self, states: Tensor) -> Tensor:
        return linear(states, self.weight).squeeze(-1)


class _Adapted:
    """Mixin for a linear layer with adapters: where they stand, and that they are added."""

    adapter: Adapter | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_module("adapter", None)  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(states)  # type: ignore[misc]
        return output if self.adapter is None else self.adapter(states, output), bias


class AdaptedColumn(_Adapted, ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear layer that may have adapters."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return _sharded_state(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets, metadata)


class AdaptedRow(_Adapted, RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear layer that may have adapters."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return _sharded_state(self, {"weight": 1}, prefix, sharded_offsets, metadata)


def _sharded_state(
    layer: AdaptedColumn | AdaptedRow, axes: dict[str, int], prefix: str, offsets: Any, metadata: Any
) -> Any:
    """megatron-core's account of what this rank holds of a layer's tensors, given the divided dimension of each."""
    if layer.adapter is not None:
        axes |= {f"adapter.{name}": axis for name, axis in layer.adapter.axes.items()}
    return make_sharded_tensors_for_checkpoint(
        layer.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        tp_group=layer.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


class NormedRowParallelLinear(AdaptedRow):
    """A row-parallel linear layer with a norm of its output."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.post_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(states)
        return self.post_layernorm(output), bias


class LayerAttention(SelfAttention):  # type: ignore[misc]
    """Self-attention that turns queries and keys by its layer's part of ``rope.Rotary``, and decodes by rows."""

    def __init__(self, *args: Any, angles: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._angles = angles

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if self._angles is not None:
            rotary_pos_emb = rotary_pos_emb[self._angles]
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)  # type: ignore[no-any-return]

    def _adjust_key_value_for_inference(
        self,
        inference_context: Pass | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: tuple[Tensor, Tensor],
        *_: Any,
        **__: Any,
    ) -> tuple[Any, ...]:
        """Where megatron-core's layers meet the cache, and the rotation, which it is told (``None``) is done.

        Its own caches hold keys before their rotation and turn all of them again for every token; a ``Pass`` is given
        them turned. Its own rotation takes cosines and sines of the angles again in every layer.
        """
        rotation, _same = rotary_pos_emb
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        blocks = None
        if inference_context is not None:
            key, value, blocks = inference_context.seen(self.layer_number, key, value)
        return query, key, value, None, self.attn_mask_type, blocks


def block_spec(
    settings: Settings, config: TransformerConfig, stage: int, virtual_stage: int | None, attention: AttentionName
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage.

    Args:
        settings: Of the whole model.
        config: The same for megatron-core.
        stage: Pipeline rank.
        virtual_stage: Part of it, where stages have parts.
        attention: Kernel.
    """
    first = get_transformer_layer_offset(config, virtual_stage, stage)
    number = get_num_layers_to_build(config, virtual_stage, stage)
    specs = [layer_spec(settings, layer, attention, config) for layer in range(first, first + number)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def layer_spec(settings: Settings, layer: int, attention: AttentionName, config: TransformerConfig) -> ModuleSpec:
    head_norm = Norm if settings.qk_norm else IdentityOp
    angles = None
    if settings.windowed_rope is not None:
        angles = WINDOWED if settings.windowed[layer] else FULL
    return ModuleSpec(
        module=MixtureLayer if settings.is_mixture(layer) else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=LayerAttention,
                params={"attn_mask_type": AttnMaskType.causal, "angles": angles},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=AdaptedColumn,
                    core_attention=_core_attention(settings, attention, config),
                    linear_proj=_output_layer(settings),
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=_mixture(settings) if settings.is_mixture(layer) else _dense(settings),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _output_layer(settings: Settings) -> type:
    return NormedRowParallelLinear if settings.post_norms else AdaptedRow


def _dense(settings: Settings) -> ModuleSpec:
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=AdaptedColumn, linear_fc2=_output_layer(settings))
    )


def _mixture(settings: Settings) -> ModuleSpec:
    # megatron-core 0.16 tests this name against None, but defines it only beside Transformer Engine.
    vars(moe_utils).setdefault("te_general_gemm", None)
    experts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    assert settings.mixture is not None
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=SequentialMLP, submodules=experts),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=experts),
            router=partial(Router, has_bias=settings.mixture.biased),
        ),
    )


def _core_attention(settings: Settings, requested: AttentionName, config: TransformerConfig) -> Any:
    """The module that turns queries, keys and values into context. Transformer Engine's is not tested here."""
    installed = find_spec("transformer_engine") is not None
    if requested == "transformer_engine" and (settings.attention_cap is not None or not installed):
        raise BackendError(
            "attention: transformer_engine cannot be used: "
            + ("it has no cap on attention scores" if installed else "transformer_engine is not installed"),
            fix="use attention: sdpa",
        )
    on_cuda = not config.use_cpu_initialization
    if requested == "transformer_engine" or (
        requested == "auto" and on_cuda and installed and settings.attention_cap is None
    ):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention
    return partial(CoreAttention, cap=settings.attention_cap)
