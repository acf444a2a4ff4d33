"""The sizes of a decoder-only language model, read from its ``config.json``: parameters, FLOPs, bytes of its cache.

# L = layers, D = hidden size, F = width of the MLP, V = vocabulary

Plain numbers, without torch and without weights: planners and efficiency metrics count with them. Where config files
are found is in ``model_files``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nemorl.errors import UsageError

KNOWN_TYPES = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite"),
        *("smollm3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt2"),
    }
)
"""``model_type`` of the architectures whose parameter count is exact; others are counted as if built like Llama."""
TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3_text", "gpt2", "smollm3", "cohere", "cohere2", "starcoder2"})
"""Architectures whose output head is the embedding unless ``config.json`` says otherwise."""
ALIASES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "n_positions": ("n_ctx",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
"""Older names of keys."""

MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Of the number of MTP layers: of DeepSeek-V3, GLM-4.5 and MiMo, and of Qwen3.5."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model. Counts are of one model, whole."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    ffn: int
    """Width of a dense layer's MLP"""
    tied: bool
    """The output head is the embedding"""
    experts: int = 0
    """Experts of a mixture layer; 0: the model has none"""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of what every token of a mixture layer passes, besides its experts"""
    dense_layers: int = 0
    """Layers of a mixture that have a dense MLP instead"""
    attention: int = 0
    """Matrix elements of one layer's attention"""
    value_dim: int = 0
    """Of a head's values, which multiply its attention weights"""
    cache_width: int = 0
    """Elements that one token adds to a layer's key-value cache"""
    mlp_matrices: int = 3
    """3 with a gate, 2 without"""
    small: int = 0
    """Biases, norms and routers' offsets of all layers together, with the last norm and learned positions"""
    window: int | None = None
    """Tokens that a sliding-window layer sees"""
    window_layers: int = 0
    mtp_layers: int = 0
    """Layers for multi-token prediction that the files have besides; ``layers`` and all sums are without them"""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Geometry:
        """The sizes that a ``config.json`` describes.

        Args:
            config: Its content. Of a multimodal model the language model inside is taken.

        Raises:
            UsageError: It lacks a size, as that of something else than a decoder of attention layers does, or has one
                that is none.
        """
        try:
            return _read(config)
        except UsageError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UsageError(
                f"the sizes of a model of type {config.get('model_type')!r} cannot be told from its config: {error!r}",
                fix="use a decoder-only language model made of attention layers, all of the same sizes",
            ) from error

    @property
    def is_exact(self) -> bool:
        """The architecture is one whose parameters are counted exactly."""
        return self.model_type in KNOWN_TYPES

    @property
    def mixture_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def expert_parameters(self) -> int:
        """All experts of all mixture layers, without routers and shared experts: what expert parallelism divides."""
        return self.mixture_layers * self.experts * self.mlp_matrices * self.hidden * self.expert_ffn

    @property
    def layer_parameters(self) -> float:
        """Mean of the layers, experts included."""
        dense = (self.layers - self.mixture_layers) * self.mlp_matrices * self.hidden * self.ffn
        common = self.mixture_layers * self._common_of_mixture
        # `small` also counts the last norm, which is nothing beside a layer.
        return self.attention + (dense + common + self.expert_parameters + self.small) / self.layers

    def parameters(self, *, value_head: bool = False) -> int:
        """Parameters of the model; with ``value_head`` its output head is one row."""
        head = self.hidden if value_head else 0 if self.tied else self.embedding_parameters
        return self.embedding_parameters + head + round(self.layers * self.layer_parameters)

    @property
    def mtp_experts(self) -> int:
        """Parameters of the experts of one MTP layer, which is a layer like the model's last one."""
        return self.expert_parameters // self.mixture_layers if self.mixture_layers else 0

    @property
    def mtp_active(self) -> int:
        """Matrix elements of one MTP layer that a token is multiplied with: a layer's, and the 2 D x D projection of
        state and embedding (DeepSeek-V3, arXiv:2412.19437, eq. 21)."""
        routed = self.experts_per_token * self.mlp_matrices * self.hidden * self.expert_ffn
        mlp = self._common_of_mixture + routed if self.experts else self.mlp_matrices * self.hidden * self.ffn
        return self.attention + mlp + 2 * self.hidden * self.hidden

    def mtp_flops(self, tokens: float, scored: float, pairs: float) -> tuple[float, float]:
        """FLOPs of one forward pass of one depth of MTP: of its layer, and of the output head.

        Args:
            tokens: Through the layer.
            scored: Positions whose logits are computed.
            pairs: (query, key) pairs.
        """
        layer = 2.0 * self.mtp_active * tokens + 2.0 * self.heads * (self.head_dim + self.value_dim) * pairs
        return layer, 2.0 * self.embedding_parameters * scored

    @property
    def mtp_common(self) -> int:
        """Parameters of one MTP layer without its experts; it has no embedding and no output head of its own."""
        mlp = self._common_of_mixture if self.experts else self.mlp_matrices * self.hidden * self.ffn
        return self.attention + mlp + 2 * self.hidden * self.hidden + 3 * self.hidden + self.small // self.layers

    @property
    def active_parameters(self) -> int:
        """Matrix elements of the layers that one token is multiplied with: of a mixture, its experts only."""
        dense = (self.layers - self.mixture_layers) * self.mlp_matrices * self.hidden * self.ffn
        routed = self.experts_per_token * self.mlp_matrices * self.hidden * self.expert_ffn
        return self.layers * self.attention + dense + self.mixture_layers * (self._common_of_mixture + routed)

    @property
    def cache_elements(self) -> int:
        """Elements of the key-value cache that one token takes, over all layers."""
        return self.layers * self.cache_width

    @property
    def cache_parts(self) -> int:
        """Parts that a layer's cache can be divided into: its key-value heads. A compressed cache is whole."""
        return self.kv_heads if self.cache_width == 2 * self.kv_heads * self.head_dim else 1

    def forward_flops(self, tokens: float, scored: float, sum_len_squared: float) -> float:
        """FLOPs of one forward pass, a multiplication and an addition being two.

        2 * active * tokens + 2 * V * D * scored + attention of pairs (query, key <= query), per layer
        2 * heads * (head_dim + value_dim) each, of which a sequence has about len^2 / 2.

        Args:
            tokens: Through the layers.
            scored: Positions whose logits are computed.
            sum_len_squared: Sum of the squared lengths of the sequences. For one that continues a cached prefix:
                (whole length)^2 - (cached length)^2.
        """
        matrices = 2.0 * self.active_parameters * tokens + 2.0 * self.embedding_parameters * scored
        return matrices + self.attention_flops(tokens, sum_len_squared / 2)

    def attention_flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of scores and weighted values, for so many (query, key) pairs in each layer without a window."""
        seen = min(pairs, tokens * self.window) if self.window else pairs
        per_pair = 2.0 * self.heads * (self.head_dim + self.value_dim)
        return per_pair * ((self.layers - self.window_layers) * pairs + self.window_layers * seen)

    def training_flops(self, tokens: float, scored: float, sum_len_squared: float) -> float:
        """FLOPs that a training step needs: the backward pass is twice the forward pass. What is computed a second
        time to save memory does not count, as in the model FLOPs utilisation of PaLM (arXiv:2204.02311, appendix B)."""
        return 3.0 * self.forward_flops(tokens, scored, sum_len_squared)

    @property
    def _common_of_mixture(self) -> int:
        """Router and shared expert of one mixture layer."""
        return self.experts * self.hidden + self.mlp_matrices * self.hidden * self.shared_ffn


def mtp_layers(config: Mapping[str, Any]) -> int:
    """Layers for multi-token prediction that a ``config.json`` says the files have.

    >>> mtp_layers({"num_hidden_layers": 61, "num_nextn_predict_layers": 1})
    1
    """
    nested = config.get("text_config")
    inner = nested if isinstance(nested, Mapping) else {}
    found = (part.get(key) for part in (config, inner) for key in MTP_KEYS)
    return next((count for count in found if isinstance(count, int)), 0)


def is_mtp_tensor(name: str, layers: int) -> bool:
    """Whether the tensor of this stored name is of an MTP layer: files count those after the model's own ``layers``.

    >>> is_mtp_tensor("model.layers.46.eh_proj.weight", 46), is_mtp_tensor("model.layers.4.mlp.gate.weight", 46)
    (True, False)
    """
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= layers


def without_mtp(names: Collection[str]) -> list[str]:
    """Those of stored tensors that are not of MTP layers, which alone join states and embeddings (``eh_proj``).

    >>> without_mtp(["model.norm.weight", "model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight"])
    ['model.norm.weight']
    """
    joined = (_LAYER.match(name) for name in names if name.endswith(".eh_proj.weight"))
    layers = min((int(found[1]) for found in joined if found), default=None)
    return [name for name in names if layers is None or not is_mtp_tensor(name, layers)]


def _read(config: Mapping[str, Any]) -> Geometry:
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = {**nested, "tie_word_embeddings": nested.get("tie_word_embeddings", config.get("tie_word_embeddings"))}
    kind = str(config.get("model_type", ""))
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads = _size(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    tied = config.get("tie_word_embeddings")
    shape = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    is_plain = kind in {"gpt2", "phi", "starcoder2", "gpt_neox", "opt"}
    attention = _latent(config, heads, hidden) if config.get("kv_lora_rank") else _grouped(shape)
    return Geometry(
        model_type=kind,
        vocabulary=_size(config, "vocab_size"),
        ffn=_mlp_width(config, kind, hidden),
        tied=kind in TIED_BY_DEFAULT if tied is None else bool(tied),
        mlp_matrices=2 if is_plain else 3,
        small=_small(config, kind, hidden, layers, heads * head_dim, kv_heads * head_dim, head_dim),
        mtp_layers=mtp_layers(config),
        **_mixture(config, kind, layers),
        **_windows(config, kind, layers),
        **{**shape, **attention},
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    for name in (key, *ALIASES.get(key, ())):
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise UsageError(
        f"the model's config (model_type {config.get('model_type')!r}) has no {key}: its size cannot be told",
        fix="use a decoder-only language model made of attention layers",
    )


def _mlp_width(config: Mapping[str, Any], kind: str, hidden: int) -> int:
    if kind == "gpt2" and not config.get("n_inner"):
        return 4 * hidden
    return _size(config, "intermediate_size")


def _grouped(shape: Mapping[str, int]) -> dict[str, int]:
    """Attention with fewer key-value heads than heads, or as many."""
    queries, keys = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    return {
        "attention": shape["hidden"] * (2 * queries + 2 * keys),
        "value_dim": shape["head_dim"],
        "cache_width": 2 * keys,
    }


def _latent(config: Mapping[str, Any], heads: int, hidden: int) -> dict[str, int]:
    """Attention over a compressed cache (DeepSeek-V2, arXiv:2405.04434). Its two inner norms count as matrices."""
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    nope, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    query_rank = int(config.get("q_lora_rank") or 0)
    width = heads * (nope + rope)
    queries = query_rank * (hidden + width + 1) if query_rank else hidden * width
    keys = hidden * (rank + rope) + rank + rank * heads * (nope + value)
    return {
        "attention": queries + keys + heads * value * hidden,
        "head_dim": nope + rope,
        "value_dim": value,
        "cache_width": rank + rope,
    }


def _mixture(config: Mapping[str, Any], kind: str, layers: int) -> dict[str, int]:
    experts = next((int(config[k]) for k in ("num_experts", *ALIASES["num_experts"]) if config.get(k)), 0)
    if not experts:
        return {}
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("shared_expert_intermediate_size") or 0) if kind == "qwen2_moe" else 0
    shared += int(config.get("n_shared_experts") or 0) * width
    every = int(config.get("decoder_sparse_step") or 1)
    dense = {*(config.get("mlp_only_layers") or ()), *range(int(config.get("first_k_dense_replace") or 0))}
    dense |= {layer for layer in range(layers) if (layer + 1) % every}
    return {
        "experts": experts,
        "experts_per_token": int(config.get("num_experts_per_tok") or 1),
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_layers": len(dense & set(range(layers))),
    }


def _windows(config: Mapping[str, Any], kind: str, layers: int) -> dict[str, int]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return {}
    if isinstance(types := config.get("layer_types"), list):
        return {"window": int(window), "window_layers": types.count("sliding_attention")}
    every = {"gemma2": 2, "gemma3_text": int(config.get("sliding_window_pattern") or 6)}.get(kind)
    full = layers // every if every else int(config.get("max_window_layers") or 0) if kind.startswith("qwen") else 0
    return {"window": int(window), "window_layers": layers - full}


def _small(
    config: Mapping[str, Any], kind: str, hidden: int, layers: int, queries: int, keys: int, head_dim: int
) -> int:
    """Parameters that are no matrices of the layers, all together."""
    if kind == "gpt2":  # biases of all matrices, three LayerNorms of two vectors, learned positions
        per_layer = 3 * hidden + hidden + _mlp_width(config, kind, hidden) + hidden + 4 * hidden
        return layers * per_layer + 2 * hidden + _size(config, "n_positions") * hidden
    norms = {"gemma2": 4, "gemma3_text": 4}.get(kind, 2) * hidden
    head_norms = {
        "qwen3": 2 * head_dim,
        "qwen3_moe": 2 * head_dim,
        "gemma3_text": 2 * head_dim,
        "olmo2": queries + keys,
    }
    if config.get("attention_bias") and kind not in {"qwen2", "qwen2_moe", "deepseek_v3"}:
        norms += queries + 2 * keys + hidden
    if kind in {"qwen2", "qwen2_moe"}:
        norms += queries + 2 * keys
    if config.get("mlp_bias"):
        norms += 2 * _mlp_width(config, kind, hidden) + hidden
    gates = _mixture(config, kind, layers)
    mixtures = layers - gates["dense_layers"] if gates else 0
    per_mixture = hidden if kind == "qwen2_moe" else 0  # how much of the shared expert counts
    return layers * (norms + head_norms.get(kind, 0)) + mixtures * per_mixture + hidden
