"""From a Hugging Face config to what megatron-core has to compute, or to the reason why it cannot.

Here: one plain description of a decoder that covers every supported architecture, and the functions that read it out of
a transformers config. Not here: modules (``layers``, ``model``) and the names of weights (``bridge.tables``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemorl.errors import BackendError

from nemorl_megatron.rope import Rope, Yarn

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations that a gated feed-forward layer may use, by transformers' names."""


@dataclass(frozen=True)
class Mixture:
    """A mixture-of-experts feed-forward layer."""

    experts: int
    per_token: int
    """Experts that each token goes to."""
    ffn: int
    """Hidden size of one expert."""
    renormalized: bool
    """Whether the chosen experts' probabilities are scaled up to add up to 1."""
    layers: tuple[bool, ...]
    """Whether each layer is a mixture; the others are dense."""
    shared_ffn: int = 0
    """Hidden size of what every token passes besides its experts; 0: nothing."""
    biased: bool = False
    """Scores are sigmoids, and a bias is added to them when experts are chosen (DeepSeek-V3, arXiv:2412.19437)."""
    scale: float = 1.0
    """Of the chosen experts' probabilities."""


@dataclass(frozen=True)
class Settings:
    """A decoder-only language model."""

    architecture: str
    """transformers' ``model_type``"""
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    """Key-value heads."""
    head: int
    """Size of one attention head."""
    vocabulary: int
    """Entries of the Hugging Face embedding: what sampling can choose from."""
    tied: bool
    """Whether input embedding and output head are one tensor."""
    norm_eps: float
    activation: Activation
    rope: Rope
    """Of full attention layers."""
    rotary: int
    """Entries of a head that are turned, the first ones."""
    initial_std: float
    """Standard deviation of randomly drawn weights."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Norms of each head's query and key."""
    window: int | None = None
    """Tokens that sliding-window layers see, the current one included."""
    windowed: tuple[bool, ...] = ()
    """Whether each layer has the window."""
    windowed_rope: Rope | None = None
    """Of sliding-window layers, where theirs differs."""
    centered_norms: bool = False
    """Norms scale by 1 + weight."""
    post_norms: bool = False
    """Norms of what attention and feed-forward add to the residual."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Factor of attention scores; unset: 1 / sqrt(head)."""
    attention_cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    logit_cap: float | None = None
    """The same for logits."""
    mixture: Mixture | None = None
    mtp_layers: int = 0
    """Layers for multi-token prediction after the model's own, each built like its last one."""
    value_head: bool = False
    """A number for each token in place of logits: no output head, whatever ``tied`` says."""

    def is_mixture(self, layer: int) -> bool:
        """Whether layer ``layer``, counted from 0, is a mixture of experts; those after the last are as it is."""
        return self.mixture is not None and self.mixture.layers[min(layer, self.layers - 1)]


def settings_of(config: Any) -> Settings:
    """The settings that a transformers config describes.

    Raises:
        BackendError: the architecture is not among ``ARCHITECTURES``, or it uses a feature that megatron-core lacks.
    """
    name = config.model_type
    if name not in ARCHITECTURES:
        raise BackendError(
            f"architecture {name!r} has no megatron-core model here (there are: {', '.join(ARCHITECTURES)})",
            fix="use policy.backend: dtensor, which trains any transformers model",
        )
    found = Settings(**{**_common(config), **ARCHITECTURES[name](config)})
    if found.mixture is not None and found.mixture.per_token == 1 and found.mixture.renormalized:
        raise _unsupported(config, "one expert per token", "its probability would be scaled up to 1, with no gradient")
    return found


def _common(config: Any) -> dict[str, Any]:
    activation = _get(config, "hidden_activation") or config.hidden_act
    if activation not in ACTIVATIONS:
        raise _unsupported(config, f"activation {activation!r}", f"known are {', '.join(ACTIVATIONS)}")
    window, windowed = _window(config)
    return {
        "architecture": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "heads": config.num_attention_heads,
        "groups": config.num_key_value_heads or config.num_attention_heads,
        "head": _get(config, "head_dim") or config.hidden_size // config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "norm_eps": config.rms_norm_eps,
        "activation": ACTIVATIONS[activation],
        "initial_std": config.initializer_range,
        "window": window,
        "windowed": windowed,
        **_ropes(config),
    }


def _llama(config: Any) -> dict[str, Any]:
    _refuse_biases(config)
    return {}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(config: Any) -> dict[str, Any]:
    _refuse_biases(config)
    return {"qk_norm": True}


def _gemma(config: Any) -> dict[str, Any]:
    _refuse_biases(config)
    if _get(config, "use_bidirectional_attention"):
        raise _unsupported(config, "attention to later tokens", "the policy must be causal")
    return {"centered_norms": True, "embedding_scale": math.sqrt(config.hidden_size)}


def _gemma2(config: Any) -> dict[str, Any]:
    return {
        **_gemma(config),
        "post_norms": True,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_cap": config.attn_logit_softcapping,
        "logit_cap": config.final_logit_softcapping,
    }


def _gemma3(config: Any) -> dict[str, Any]:
    return {**_gemma2(config), "qk_norm": True}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    every, dense = config.decoder_sparse_step, config.mlp_only_layers
    layers = tuple(
        layer not in dense and every > 0 and (layer + 1) % every == 0 for layer in range(config.num_hidden_layers)
    )
    return {
        **_qwen3(config),
        "mixture": Mixture(
            experts=config.num_experts,
            per_token=config.num_experts_per_tok,
            ffn=config.moe_intermediate_size,
            renormalized=config.norm_topk_prob,
            layers=layers,
        ),
    }


def _glm4_moe(config: Any) -> dict[str, Any]:
    if not config.norm_topk_prob:
        raise _unsupported(config, "norm_topk_prob=False", "chosen scores are divided by their sum")
    if config.n_group > 1:
        raise _unsupported(config, f"{config.n_group} groups of experts", "experts are chosen among all of a layer")
    dense = config.first_k_dense_replace
    return {
        "qkv_bias": config.attention_bias,
        "qk_norm": config.use_qk_norm,
        "mixture": Mixture(
            experts=config.n_routed_experts,
            per_token=config.num_experts_per_tok,
            ffn=config.moe_intermediate_size,
            renormalized=True,
            layers=tuple(layer >= dense for layer in range(config.num_hidden_layers)),
            shared_ffn=config.moe_intermediate_size * config.n_shared_experts,
            biased=True,
            scale=config.routed_scaling_factor,
        ),
    }


def _mixtral(config: Any) -> dict[str, Any]:
    if config.router_jitter_noise:
        raise _unsupported(config, "noise on the router's input", "two passes would give different log-probs")
    return {
        "mixture": Mixture(
            experts=config.num_local_experts,
            per_token=config.num_experts_per_tok,
            ffn=config.intermediate_size,
            renormalized=True,
            layers=(True,) * config.num_hidden_layers,
        ),
    }


ARCHITECTURES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": lambda config: {},
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "glm4_moe": _glm4_moe,
}
"""Differences of each architecture from a plain Llama, by transformers' ``model_type``."""


def _window(config: Any) -> tuple[int | None, tuple[bool, ...]]:
    window = _get(config, "sliding_window")
    if window is None:
        return None, ()
    kinds = _get(config, "layer_types") or ["sliding_attention"] * config.num_hidden_layers
    unknown = sorted({*kinds} - {"sliding_attention", "full_attention"})
    if unknown:
        raise _unsupported(config, f"attention of type {unknown[0]!r}", "only full and sliding-window attention exist")
    return window, tuple(kind == "sliding_attention" for kind in kinds)


def _ropes(config: Any) -> dict[str, Any]:
    """One table of frequencies, or one for each type of attention, and how much of a head they turn."""
    found = config.rope_parameters
    head = _get(config, "head_dim") or config.hidden_size // config.num_attention_heads
    kinds = [found["full_attention"], found.get("sliding_attention")] if "full_attention" in found else [found, None]
    full, windowed = kinds
    turned = int(head * full.get("partial_rotary_factor", 1.0))
    return {
        "rope": _rope(config, full),
        "windowed_rope": windowed and _rope(config, windowed),
        "rotary": turned,
    }


def _rope(config: Any, parameters: Mapping[str, Any]) -> Rope:
    kind = parameters.get("rope_type", "default")
    theta = float(parameters["rope_theta"])
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, factor=parameters["factor"])
    if kind == "llama3":
        return Rope(
            theta,
            factor=parameters["factor"],
            low_frequency=parameters["low_freq_factor"],
            high_frequency=parameters["high_freq_factor"],
            original_length=parameters["original_max_position_embeddings"],
        )
    if kind == "yarn":
        return _yarn(config, parameters, theta)
    raise _unsupported(
        config,
        f"rotary scaling of type {kind!r}",
        "there are default, linear, llama3 and yarn; others depend on the length",
    )


def _yarn(config: Any, parameters: Mapping[str, Any], theta: float) -> Yarn:
    original = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or config.max_position_embeddings / original
    weight, other = parameters.get("mscale"), parameters.get("mscale_all_dim")
    amplitude = parameters.get("attention_factor")
    if amplitude is None and weight and other:
        amplitude = Yarn.usual_amplitude(factor, weight) / Yarn.usual_amplitude(factor, other)
    return Yarn(
        theta,
        factor=factor,
        low_frequency=parameters.get("beta_slow") or 1,
        high_frequency=parameters.get("beta_fast") or 32,
        original_length=original,
        amplitude=Yarn.usual_amplitude(factor) if amplitude is None else amplitude,
        truncated=parameters.get("truncate", True),
    )


def _refuse_biases(config: Any) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if _get(config, name):
            raise _unsupported(config, f"{name}=True", "linear layers have no biases but those of Qwen2's attention")


def _get(config: Any, name: str) -> Any:
    """A field that not every architecture's config has."""
    return config.to_dict().get(name)


def _unsupported(config: Any, what: str, why: str) -> BackendError:
    return BackendError(
        f"a {config.model_type} model with {what} cannot be trained with megatron-core: {why}",
        fix="use policy.backend: dtensor, which trains any transformers model",
    )
