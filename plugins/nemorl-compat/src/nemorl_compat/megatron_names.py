"""A checkpoint of NeMo RL's Megatron backend (megatron-core's format ``torch_dist``) under transformers' names.

# L = layers, E = experts of a layer, F = hidden size of a feed-forward layer, H = hidden size of the model
# G = key-value heads, Q = query heads of each, D = size of a head

Such a folder is one of ``torch.distributed.checkpoint``, whose tensors are whole, however many ranks wrote them. Names
differ by how megatron-core was built and asked to save: layers are stacked in one tensor [L, ...] or have their number
in the name; so have experts, [E, ...] after the layers; gates and the rest of a feed-forward layer are one tensor,
gates above, or two; and norms belong to the layer that they stand before (Transformer Engine) or stand alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from nemorl.errors import UsageError
from torch import Tensor

from nemorl_compat.checkpoints import require_none

ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe"})
"""transformers' ``model_type`` of models that megatron-core has no further parameters of."""
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
ONCE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Padded, so that ranks have as many entries each."""
SAME: Mapping[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    "mlp.gate.weight": ("mlp.router.weight",),
    "mlp.gate.e_score_correction_bias": ("mlp.router.expert_bias",),
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight",),
}
"""Tensors of a layer that lie in memory alike, by what stands in its place."""
HALVES = {"mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 1}
HALVES |= {name.replace("mlp.", "mlp.shared_experts."): half for name, half in HALVES.items()}


@dataclass
class Layers:
    """The tensors of a checkpoint, layer by layer."""

    folder: str
    tensors: Mapping[str, Tensor]
    """By name, as they are stored"""
    used: set[str] = field(default_factory=set)

    def of(self, layer: int, *names: str) -> Tensor | None:
        """That of a layer, by the first of these names that there is."""
        for name in names:
            for key, index in ((f"decoder.layers.{layer}.{name}", None), (f"decoder.layers.{name}", layer)):
                if key in self.tensors:
                    self.used.add(key)
                    return self.tensors[key] if index is None else self.tensors[key][index]
        return None

    def halves(self, layer: int, name: str) -> Tensor | None:
        """[..., 2F, H] gates above the rest, of a feed-forward layer that holds both."""
        whole = self.of(layer, name)
        if whole is not None:
            return whole
        gate, up = (self.of(layer, f"{name}_{half}") for half in "wv")
        return None if gate is None or up is None else torch.cat((gate, up), -2)

    def experts(self, layer: int, count: int, matrix: str) -> Tensor | None:
        """[E, ...] the ``matrix`` of all experts of a layer."""
        read = self.halves if matrix == "linear_fc1" else self.of
        whole = read(layer, f"mlp.experts.experts.{matrix}.weight")
        if whole is not None:
            return whole
        each = [read(layer, f"mlp.experts.experts.{expert}.{matrix}.weight") for expert in range(count)]
        present = [one for one in each if one is not None]
        return torch.stack(present) if len(present) == count else None

    def left(self) -> list[str]:
        """Names that nothing was read of."""
        return sorted({*self.tensors} - self.used)


def is_of_weights(name: str) -> bool:
    """Whether a stored tensor is one of the model, not of the optimizer or of what a kernel keeps."""
    return not name.startswith(("optimizer.", "rng_state", "rerun_state")) and "_extra_state" not in name


def transformers_tensors(
    config: Any, expected: Mapping[str, tuple[int, ...]], stored: Layers, tied: set[str]
) -> dict[str, Tensor]:
    """The tensors of a model, under the names that it has in memory.

    Args:
        config: Of transformers.
        expected: Shapes by name.
        stored: The checkpoint.
        tied: Names that are other tensors of the model.

    Raises:
        UsageError: The architecture has parameters of other kinds.
        CheckpointError: It is another model's.
    """
    if config.model_type not in ARCHITECTURES:
        raise UsageError(
            f"{stored.folder} is a Megatron checkpoint of a {config.model_type} model, and those that are read are of "
            f"{', '.join(sorted(ARCHITECTURES))}",
            fix="convert it with NeMo RL's own examples/converters/convert_megatron_to_hf.py, then use model: FOLDER",
        )
    found: dict[str, Tensor] = {}
    wrong: list[str] = []
    for name, shape in expected.items():
        tensor = _tensor(config, name, tuple(shape), stored)
        if tensor is None:
            wrong += [] if name in tied else [f"{name} is missing"]
        elif tuple(tensor.shape) != tuple(shape):
            wrong.append(f"{name} is {list(tensor.shape)}, in the model {list(shape)}")
        else:
            found[name] = tensor
    wrong += [f"{name} is unknown" for name in stored.left()]
    require_none(wrong, stored.folder, f"this {config.model_type} model")
    return found


def _tensor(config: Any, name: str, shape: tuple[int, ...], stored: Layers) -> Tensor | None:
    match = LAYER.fullmatch(name)
    if match is None:
        key = ONCE.get(name, name)
        if key not in stored.tensors:
            return None
        stored.used.add(key)
        return stored.tensors[key][: shape[0]] if name in VOCABULARY else stored.tensors[key]
    layer, rest = int(match[1]), match[2]
    if rest in SAME:
        return stored.of(layer, *SAME[rest])
    if rest in HALVES:
        both = stored.halves(layer, f"{rest.rpartition('.')[0].rpartition('.')[0]}.linear_fc1.weight")
        return None if both is None else both.chunk(2, -2)[HALVES[rest]]
    if rest in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        return stored.experts(layer, shape[0], "linear_fc1" if rest.endswith("gate_up_proj") else "linear_fc2")
    attention = re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", rest)
    if attention is None:
        return None
    joint = stored.of(layer, f"self_attention.linear_qkv.{attention[2]}")
    return None if joint is None else _of_joint(config, joint, attention[1])


def _of_joint(config: Any, joint: Tensor, which: str) -> Tensor:
    """Queries, keys or values out of [G * (Q + 2) * D, ...], where each key-value head follows its query heads."""
    groups = config.num_key_value_heads or config.num_attention_heads
    queries = config.num_attention_heads // groups
    heads = joint.view(groups, queries + 2, -1, *joint.shape[1:])
    chosen = {"q": heads[:, :queries], "k": heads[:, queries], "v": heads[:, queries + 1]}[which]
    return chosen.reshape(-1, *joint.shape[1:])
