"""Which stored tensors make which parameter, and how they lie in it: plain data, one table per architecture.

A parameter is named as megatron-core names it, with layers and experts counted over the whole model. Stored names are
those of Hugging Face files. How a rule divides a tensor is in ``bridge.rules``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nemorl_megatron.settings import Settings

RuleName = Literal["whole", "float32", "row", "vocabulary", "gate_up", "qkv"]
Size = Literal["vocabulary", "hidden", "ffn", "expert_ffn", "shared_ffn", "query", "key", "head", "experts"]
Where = Literal["once", "head", "layer", "dense", "mixture", "expert"]


@dataclass(frozen=True)
class Stored:
    """A tensor of a Hugging Face file."""

    name: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Entry:
    """A parameter, or one for each layer, or for each expert of each layer."""

    parameter: str
    rule: RuleName
    stored: tuple[Stored, ...]
    where: Where
    """``once`` in a model; ``head``: once, where the output head is not the embedding; in every ``layer``; in ``dense``
    or ``mixture`` layers; for each ``expert`` of the latter."""


@dataclass(frozen=True)
class Weight:
    """One parameter of one model."""

    parameter: str
    rule: RuleName
    stored: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the stored tensors."""
    layer: int | None = None
    expert: int | None = None


def weights(settings: Settings) -> Iterator[Weight]:
    """Every parameter of a model that is stored, embedding first, layer by layer, output head last."""
    table = [entry for entry in TABLES[settings.architecture] if _is_there(entry, settings)]
    once = [entry for entry in table if entry.where == "once"]
    yield from (_weight(entry, settings) for entry in once if entry.parameter.startswith("embedding"))
    for layer in range(settings.layers):
        for entry in table:
            if entry.where == "layer" or entry.where == ("mixture" if settings.is_mixture(layer) else "dense"):
                yield _weight(entry, settings, layer)
            elif entry.where == "expert" and settings.is_mixture(layer):
                assert settings.mixture is not None
                yield from (_weight(entry, settings, layer, expert) for expert in range(settings.mixture.experts))
    yield from (_weight(entry, settings) for entry in once if not entry.parameter.startswith("embedding"))
    if settings.value_head:
        shapes = ((1, settings.hidden),)
        yield Weight("value_head.weight", "whole", (VALUE_HEAD,), shapes)
    elif not settings.tied:
        yield from (_weight(entry, settings) for entry in table if entry.where == "head")


def _is_there(entry: Entry, settings: Settings) -> bool:
    """An architecture may leave it to the config whether attention has biases and norms of heads."""
    if entry in _QKV_BIAS:
        return settings.qkv_bias
    return settings.qk_norm if entry in _HEAD_NORMS else True


def tied_head(settings: Settings) -> Weight:
    """The output head that is a copy of the embedding: the last stage has one, no file does."""
    (embedding,) = (entry for entry in TABLES[settings.architecture] if entry.parameter.startswith("embedding"))
    return replace(_weight(embedding, settings), parameter=HEAD)


def _weight(entry: Entry, settings: Settings, layer: int | None = None, expert: int | None = None) -> Weight:
    sizes: Mapping[Size, int] = {
        "vocabulary": settings.vocabulary,
        "hidden": settings.hidden,
        "ffn": settings.ffn,
        "expert_ffn": settings.mixture.ffn if settings.mixture else 0,
        "shared_ffn": settings.mixture.shared_ffn if settings.mixture else 0,
        "experts": settings.mixture.experts if settings.mixture else 0,
        "query": settings.heads * settings.head,
        "key": settings.groups * settings.head,
        "head": settings.head,
    }
    return Weight(
        parameter=entry.parameter.format(layer=layer, expert=expert),
        rule=entry.rule,
        stored=tuple(tensor.name.format(layer=layer, expert=expert) for tensor in entry.stored),
        shapes=tuple(tuple(sizes[size] for size in tensor.shape) for tensor in entry.stored),
        layer=layer,
        expert=expert,
    )


HEAD = "output_layer.weight"
VALUE_HEAD = "score.weight"
"""The name in transformers' sequence classifiers."""
_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def _norm(parameter: str, stored: str, size: Size = "hidden") -> Entry:
    return Entry(_LAYER + parameter, "whole", (Stored(_HF + stored, (size,)),), "layer")


_ENDS = (
    Entry(
        "embedding.word_embeddings.weight",
        "vocabulary",
        (Stored("model.embed_tokens.weight", ("vocabulary", "hidden")),),
        "once",
    ),
    Entry("decoder.final_layernorm.weight", "whole", (Stored("model.norm.weight", ("hidden",)),), "once"),
    Entry(HEAD, "vocabulary", (Stored("lm_head.weight", ("vocabulary", "hidden")),), "head"),
)
_ATTENTION = (
    _norm("input_layernorm.weight", "input_layernorm.weight"),
    Entry(
        _LAYER + "self_attention.linear_qkv.weight",
        "qkv",
        (
            Stored(_HF + "self_attn.q_proj.weight", ("query", "hidden")),
            Stored(_HF + "self_attn.k_proj.weight", ("key", "hidden")),
            Stored(_HF + "self_attn.v_proj.weight", ("key", "hidden")),
        ),
        "layer",
    ),
    Entry(
        _LAYER + "self_attention.linear_proj.weight",
        "row",
        (Stored(_HF + "self_attn.o_proj.weight", ("hidden", "query")),),
        "layer",
    ),
)
_QKV_BIAS = (
    Entry(
        _LAYER + "self_attention.linear_qkv.bias",
        "qkv",
        (
            Stored(_HF + "self_attn.q_proj.bias", ("query",)),
            Stored(_HF + "self_attn.k_proj.bias", ("key",)),
            Stored(_HF + "self_attn.v_proj.bias", ("key",)),
        ),
        "layer",
    ),
)
_HEAD_NORMS = (
    _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)
_FEED_FORWARD_NORM = (_norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),)
_GEMMA2_NORMS = (
    _norm("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"),
    _norm("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
    _norm("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
)
_DENSE = (
    Entry(
        _LAYER + "mlp.linear_fc1.weight",
        "gate_up",
        (
            Stored(_HF + "mlp.gate_proj.weight", ("ffn", "hidden")),
            Stored(_HF + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        "dense",
    ),
    Entry(_LAYER + "mlp.linear_fc2.weight", "row", (Stored(_HF + "mlp.down_proj.weight", ("hidden", "ffn")),), "dense"),
)


def _mixture(module: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """A router and its experts, by the names that an architecture gives them."""
    expert = f"{_HF}{module}.experts.{{expert}}."
    ours = _LAYER + "mlp.experts.local_experts.{expert}."
    return (
        Entry(
            _LAYER + "mlp.router.weight",
            "whole",
            (Stored(f"{_HF}{module}.gate.weight", ("experts", "hidden")),),
            "mixture",
        ),
        Entry(
            ours + "linear_fc1.weight",
            "gate_up",
            (
                Stored(f"{expert}{gate}.weight", ("expert_ffn", "hidden")),
                Stored(f"{expert}{up}.weight", ("expert_ffn", "hidden")),
            ),
            "expert",
        ),
        Entry(
            ours + "linear_fc2.weight", "row", (Stored(f"{expert}{down}.weight", ("hidden", "expert_ffn")),), "expert"
        ),
    )


def _shared_experts(module: str) -> tuple[Entry, ...]:
    """The feed-forward layer that every token of a mixture passes."""
    ours, theirs = _LAYER + "mlp.shared_experts.", f"{_HF}{module}."
    return (
        Entry(
            ours + "linear_fc1.weight",
            "gate_up",
            (
                Stored(theirs + "gate_proj.weight", ("shared_ffn", "hidden")),
                Stored(theirs + "up_proj.weight", ("shared_ffn", "hidden")),
            ),
            "mixture",
        ),
        Entry(
            ours + "linear_fc2.weight",
            "row",
            (Stored(theirs + "down_proj.weight", ("hidden", "shared_ffn")),),
            "mixture",
        ),
    )


_ROUTER_BIAS = (
    Entry(
        _LAYER + "mlp.router.expert_bias",
        "float32",
        (Stored(_HF + "mlp.gate.e_score_correction_bias", ("experts",)),),
        "mixture",
    ),
)
_LLAMA = (*_ENDS, *_ATTENTION, *_FEED_FORWARD_NORM, *_DENSE)
_GEMMA2 = (*_ENDS, *_ATTENTION, *_GEMMA2_NORMS, *_DENSE)
TABLES: Mapping[str, tuple[Entry, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "gemma": _LLAMA,
    "qwen2": (*_LLAMA, *_QKV_BIAS),
    "qwen3": (*_LLAMA, *_HEAD_NORMS),
    "gemma2": _GEMMA2,
    "gemma3_text": (*_GEMMA2, *_HEAD_NORMS),
    "qwen3_moe": (*_LLAMA, *_HEAD_NORMS, *_mixture("mlp", "gate_proj", "up_proj", "down_proj")),
    "glm4_moe": (
        *_LLAMA,
        *_QKV_BIAS,
        *_HEAD_NORMS,
        *_mixture("mlp", "gate_proj", "up_proj", "down_proj"),
        *_shared_experts("mlp.shared_experts"),
        *_ROUTER_BIAS,
    ),
    "mixtral": (*_LLAMA, *_mixture("block_sparse_moe", "w1", "w3", "w2")),
}
"""By transformers' ``model_type``."""
