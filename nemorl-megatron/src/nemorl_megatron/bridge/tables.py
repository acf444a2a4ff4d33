"""Which stored tensors make which parameter, and how they lie in it: plain data, one table per architecture.

A parameter is named as megatron-core names it, with layers and experts counted over the whole model. Stored names are
those of Hugging Face files. How a rule divides a tensor is in ``bridge.rules``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nemorl_megatron.settings import Settings

RuleName = Literal["whole", "float32", "row", "vocabulary", "gate_up", "qkv"]
Size = Literal[
    "vocabulary", "hidden", "ffn", "expert_ffn", "shared_ffn", "query", "key", "head", "experts", "two_hidden"
]
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
        yield from _of_layer(table, settings, layer)
    for depth in range(settings.mtp_layers):
        yield from _of_mtp_layer(table, settings, depth)
    yield from (_weight(entry, settings) for entry in once if not entry.parameter.startswith("embedding"))
    if settings.value_head:
        shapes = ((1, settings.hidden),)
        yield Weight("value_head.weight", "whole", (VALUE_HEAD,), shapes)
    elif not settings.tied:
        yield from (_weight(entry, settings) for entry in table if entry.where == "head")


def _of_layer(table: Sequence[Entry], settings: Settings, layer: int) -> Iterator[Weight]:
    for entry in table:
        if entry.where == "layer" or entry.where == ("mixture" if settings.is_mixture(layer) else "dense"):
            yield _weight(entry, settings, layer)
        elif entry.where == "expert" and settings.is_mixture(layer):
            assert settings.mixture is not None
            yield from (_weight(entry, settings, layer, expert) for expert in range(settings.mixture.experts))


def _of_mtp_layer(table: Sequence[Entry], settings: Settings, depth: int) -> Iterator[Weight]:
    """An MTP layer, counted from 0: files count it as a layer after the model's last. It is on the last stage."""
    layer, ours = settings.layers + depth, f"mtp.layers.{depth}."
    for weight in _of_layer(table, settings, layer):
        inner = weight.parameter.removeprefix(_LAYER.format(layer=layer))
        yield replace(weight, parameter=f"{ours}transformer_layer.{inner}", layer=None)
    for entry in _MTP:
        found = _weight(entry, settings, layer)
        yield replace(found, parameter=ours + entry.parameter, layer=None)


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
        "two_hidden": 2 * settings.hidden,
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
_MTP = (
    Entry("enorm.weight", "whole", (Stored(_HF + "enorm.weight", ("hidden",)),), "layer"),
    Entry("hnorm.weight", "whole", (Stored(_HF + "hnorm.weight", ("hidden",)),), "layer"),
    # Its rows are divided as those of the vocabulary are; there are none to add.
    Entry("eh_proj.weight", "vocabulary", (Stored(_HF + "eh_proj.weight", ("hidden", "two_hidden")),), "layer"),
    Entry("final_layernorm.weight", "whole", (Stored(_HF + "shared_head.norm.weight", ("hidden",)),), "layer"),
)
"""Of an MTP layer besides those of a layer of the model, by the names of DeepSeek-V3 and GLM-4.5."""
MTP_COPIES: Mapping[str, str] = {
    "model.embed_tokens.weight": _HF + "embed_tokens.weight",
    "lm_head.weight": _HF + "shared_head.head.weight",
}
"""Files hold the model's embedding and output head again with each MTP layer, which shares them."""


def mtp_copies(settings: Settings, name: str) -> list[str]:
    """Other names under which files hold the tensor ``name``."""
    copy = MTP_COPIES.get(name)
    layers = range(settings.layers, settings.layers + settings.mtp_layers)
    return [copy.format(layer=layer) for layer in layers] if copy else []


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
