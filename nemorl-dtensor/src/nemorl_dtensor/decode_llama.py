"""Decoding for the Llama family, written by hand: a step is about fifteen tensor operations per layer.

It reads the live weights of a transformers model (no copy, but see ``JOINED_BYTES`` and ``PACKED_BYTES``) and its own
rotary module, so it agrees with the model's forward pass. What differs between the architectures it serves is in
``FAMILY``; everything else takes ``decode_hf``.
"""

# N = tokens of all rows, U = distinct prompts, P = prompt tokens, R = rows, T = cached columns, V = vocabulary
# Q = query heads, H = key-value heads, G = Q / H, d = head size, D = hidden size

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from nemorl.media import Media
from nemorl_tensors.engines.kv_cache import CachedRows, KVCache, Recent
from nemorl_tensors.engines.turns import Turns
from nemorl_tensors.products import packed, packs, product
from torch import Tensor
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [N, Q, d], keys [N, H, d], values [N, H, d]) -> [N, Q * d]"""


@dataclass(frozen=True)
class Features:
    """Features that distinguish an architecture of the family. Biases are found on the modules."""

    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation."""


FAMILY = {
    "llama": Features(),
    "mistral": Features(),
    "qwen2": Features(),
    "qwen3": Features(qk_norm=True),
}


def is_llama_like(model: Any, max_tokens: int) -> bool:
    """Whether the hand-written path computes what ``model`` does, up to ``max_tokens``."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    slides = window is not None and window < max_tokens
    if getattr(config, "layer_types", None) is not None:
        slides = slides and "sliding_attention" in config.layer_types
    # Rotary types whose frequencies depend on the sequence at hand have no fixed table.
    rope_type = getattr(getattr(model.base_model, "rotary_emb", None), "rope_type", None)
    return config.model_type in FAMILY and not slides and rope_type in {"default", "linear", "llama3", "yarn"}


@dataclass(frozen=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> _Linear:
        return cls(module.weight, module.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)

    def packed(self) -> _Linear:
        """The same over a copy of the weight that products of few rows are faster with."""
        return _Linear(packed(self.weight, PACKED_ROWS), self.bias)


JOINED_BYTES = 1 << 20
"""Projections of one input that are smaller than this together are copied into one matrix whenever the weights change:
where a call costs more than its arithmetic, three calls become one. Larger ones are used where they are."""


PACKED_BYTES = 1 << 30
"""Weights on a CPU that are not larger together are packed for decoding (``products.packed``), which copies them …"""
PACKED_STEPS = 16
"""… where room for so many steps is asked for: making the copies takes as long as a dozen steps save."""
PACKED_ROWS = 32


def _joined(*parts: _Linear, limit: float = JOINED_BYTES) -> _Linear | None:
    """The projections as one, outputs side by side; ``None`` where that would copy more than ``limit`` bytes."""
    if sum(part.weight.nbytes for part in parts) > limit:
        return None
    biases = [part.bias for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)):
        return None
    return _Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: _Linear
    mlp_norm: Tensor
    gate: _Linear
    up: _Linear
    down: _Linear
    query_key_value: _Linear | None
    gate_up: _Linear | None

    @classmethod
    def of(cls, block: Any, features: Features) -> _Layer:
        attention, mlp = block.self_attn, block.mlp
        query, key, value = (_Linear.of(m) for m in (attention.q_proj, attention.k_proj, attention.v_proj))
        gate, up = _Linear.of(mlp.gate_proj), _Linear.of(mlp.up_proj)
        return cls(
            input_norm=block.input_layernorm.weight,
            query=query,
            key=key,
            value=value,
            query_norm=attention.q_norm.weight if features.qk_norm else None,
            key_norm=attention.k_norm.weight if features.qk_norm else None,
            output=_Linear.of(attention.o_proj),
            mlp_norm=block.post_attention_layernorm.weight,
            gate=gate,
            up=up,
            down=_Linear.of(mlp.down_proj),
            query_key_value=None if features.qk_norm else _joined(query, key, value),
            gate_up=_joined(gate, up),
        )

    @property
    def nbytes(self) -> int:
        """Of its matrices."""
        parts = (self.query, self.key, self.value, self.output, self.gate, self.up, self.down)
        return sum(part.weight.nbytes for part in parts)

    def packed(self) -> _Layer:
        """The same over packed copies of its matrices, those of one input joined where they can be."""
        attention = None if self.query_norm is not None else _joined(self.query, self.key, self.value, limit=inf)
        gate_up = _joined(self.gate, self.up, limit=inf)
        return replace(
            self,
            query=self.query if attention else self.query.packed(),
            key=self.key if attention else self.key.packed(),
            value=self.value if attention else self.value.packed(),
            query_key_value=attention and attention.packed(),
            output=self.output.packed(),
            gate=self.gate if gate_up else self.gate.packed(),
            up=self.up if gate_up else self.up.packed(),
            gate_up=gate_up and gate_up.packed(),
            down=self.down.packed(),
        )


class LlamaDecoder(CachedRows):
    """Rows of one batch over the live weights of a Llama-like transformers model."""

    def __init__(self, model: Any, max_tokens: int, turn_tokens: int = 0) -> None:
        """
        Args:
            model: Whose weights are read.
            max_tokens: Of the longest sequence.
            turn_tokens: Most that are kept of conversations between their turns.
        """
        features, body, config = FAMILY[model.config.model_type], model.base_model, model.config
        self._layers = [_Layer.of(block, features) for block in body.layers]
        self._embedding: Tensor = body.embed_tokens.weight
        self._final_norm: Tensor = body.norm.weight
        self._head = _Linear.of(model.lm_head)
        attention = body.layers[0].self_attn
        self._eps: float = config.rms_norm_eps
        self._scale: float = attention.scaling
        self._activation = functional.silu if config.hidden_act in {"silu", "swish"} else body.layers[0].mlp.act_fn
        self._heads, self._kv_heads, self._head_size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
        )
        dtype, device = self._embedding.dtype, self._embedding.device
        self._cos, self._sin = _rotary_tables(body.rotary_emb, max_tokens, dtype, device)
        cache = KVCache(
            len(self._layers), self._kv_heads, self._head_size, dtype, device, shares_prompts=device.type == "cpu"
        )
        super().__init__(cache, Turns(turn_tokens))
        size = self._head.weight.nbytes + sum(layer.nbytes for layer in self._layers)
        self._may_pack = size <= PACKED_BYTES and packs(self._head.weight)

    def admit(self, prompts: Sequence[tuple[int, ...]], reserve_tokens: int, media: Mapping[int, Media]) -> Tensor:
        if self._may_pack and reserve_tokens >= PACKED_STEPS:
            self._layers = [layer.packed() for layer in self._layers]
            self._head = self._head.packed()
            self._may_pack = False
        return super().admit(prompts, reserve_tokens, media)

    def step(self, tokens: Tensor) -> Tensor:
        positions = self._cache.positions()
        if isinstance(positions, int):
            cos, sin = self._cos[positions], self._sin[positions]
        else:
            cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        keys, values, mask = self._cache.append()
        rows, groups = len(tokens), self._heads // self._kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer_keys, layer_values = keys[layer], values[layer]
            layer_keys[:, :, -1] = k
            layer_values[:, :, -1] = v
            q = q.view(rows, self._kv_heads, groups, -1)
            return self._cache.attend(layer, q, layer_keys, layer_values, mask, self._scale)

        return self._forward(tokens, cos, sin, attend)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [U, V] after each prompt, keys and values [L, U, H, P, d]), right-padded: causal needs no mask."""
        count, width = len(prompts), max(map(len, prompts))
        device = self._embedding.device
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        cos, sin = (table[:width].repeat(count, 1).unsqueeze(1) for table in (self._cos, self._sin))
        stored: list[tuple[Tensor, Tensor]] = []

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(count, width, -1, self._head_size).transpose(1, 2) for x in (q, k, v))
            stored.append((k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
            return mixed.transpose(1, 2).reshape(count * width, -1)

        last = torch.tensor([row * width + len(prompt) - 1 for row, prompt in enumerate(prompts)], device=device)
        logits = self._forward(ids.flatten(), cos, sin, attend, last)
        keys, values = zip(*stored, strict=True)
        return logits, torch.stack(keys), torch.stack(values)

    def _go_on(self, ids: Tensor, recent: Recent) -> Tensor:
        """[R, V] after the last tokens [R, W] of rows whose earlier ones are in the cache."""
        rows, width = ids.shape
        cos, sin = (table[recent.positions].view(rows * width, 1, -1) for table in (self._cos, self._sin))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.reshape(rows, width, -1, self._head_size).transpose(1, 2) for x in (q, k, v))
            keys, values = recent.seen(layer, k, v)
            mixed = functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=recent.mask, scale=self._scale, enable_gqa=True
            )
            return mixed.transpose(1, 2).reshape(rows * width, -1)

        last = torch.arange(1, rows + 1, device=ids.device) * width - 1
        return self._forward(ids.flatten(), cos, sin, attend, last)

    def _forward(
        self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend, select: Tensor | None = None
    ) -> Tensor:
        """[N] tokens -> [N or len(select), V] logits."""
        x = functional.embedding(tokens, self._embedding)
        size, eps, queries = (x.shape[-1],), self._eps, self._heads
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(x, size, layer.input_norm, eps)
            qk, v = self._project(layer, normed)
            qk = _rotate(qk, cos, sin)
            mixed = attend(index, qk[:, :queries], qk[:, queries:], v)
            x = x.add_(layer.output(mixed))
            normed = functional.rms_norm(x, size, layer.mlp_norm, eps)
            if layer.gate_up is not None:
                gate, up = layer.gate_up(normed).chunk(2, -1)
            else:
                gate, up = layer.gate(normed), layer.up(normed)
            x = x.add_(layer.down(self._activation(gate).mul_(up)))
        if select is not None:
            x = x[select]
        return self._head(functional.rms_norm(x, size, self._final_norm, eps))

    def _project(self, layer: _Layer, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [N, Q + H, d], not yet rotated, and values [N, H, d]."""
        if layer.query_key_value is not None:
            heads = self._split(layer.query_key_value(normed))
            return heads[:, : -self._kv_heads], heads[:, -self._kv_heads :]
        q, k = self._split(layer.query(normed)), self._split(layer.key(normed))
        if layer.query_norm is not None and layer.key_norm is not None:
            q = functional.rms_norm(q, (self._head_size,), layer.query_norm, self._eps)
            k = functional.rms_norm(k, (self._head_size,), layer.key_norm, self._eps)
        return torch.cat((q, k), 1), self._split(layer.value(normed))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self._head_size)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding: swapping the halves by a roll, with the minus sign moved into the table."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), signed_sin)


def _rotary_tables(rotary: Any, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """[tokens, d] cosines and sines of the model's own rotary module, the sines of the first half negated."""
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), torch.arange(tokens, device=device)[None])
    half = sin.shape[-1] // 2
    return cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
