"""Generation's passes through the model: what layers are told in one, and the decoder that makes them.

megatron-core hands an inference context to every layer; a :class:`RowPass` is one, for rows whose tokens stand at
positions of their own. Keys and values lie in the kernel's cache, this rank's heads of this rank's layers. How ranks
pass on to each other what they computed is in ``inference_ranks``.
"""

# S = tokens of a row in this pass, B = rows, g = key-value heads of this rank, D = head size, T = cached columns
# V = vocabulary

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

import torch
from megatron.core.inference.contexts import BaseInferenceContext
from nemorl_tensors.engines.kv_cache import CachedRows, KVCache, Recent
from torch import Tensor

if TYPE_CHECKING:
    from nemorl_tensors.engines.turns import Turns

    from nemorl_megatron.inference_ranks import Stages


class Pass(Protocol):
    """Information for the layers: this, and what megatron-core's own inference contexts say."""

    mask: Tensor | None
    """Mask that core attention adds to its scores."""

    @property
    def positions(self) -> Tensor:
        """[S, B] of the tokens within their rows, or what broadcasts to it."""
        ...

    def seen(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """A layer's keys and values of the pass's tokens, after their rotation [S, B, g, D], to all that it attends to.

        Layers come in their order. The third says which blocks of these are whose, where they lie in blocks.
        """
        ...


class RowPass(BaseInferenceContext):  # type: ignore[misc]
    """One pass over rows, in evaluation mode and without sequence parallelism."""

    positions: Tensor

    def __init__(self, positions: Tensor, mask: Tensor | None = None) -> None:
        """
        Args:
            positions: [S, B] of the tokens within their rows, or what broadcasts to it.
            mask: What core attention adds to its scores.
        """
        super().__init__(materialize_only_last_token_logits=False)
        self.positions = positions
        self.mask = mask

    @abstractmethod
    def seen(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]: ...

    def is_static_batching(self) -> bool:
        return True

    def is_decode_only(self) -> bool:
        return False


class Prompts(RowPass):
    """Whole prompts, padded at the end; keeps their keys and values."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        """
        Args:
            tokens: Of the longest.
            device: Of the model.
        """
        super().__init__(torch.arange(tokens, device=device)[:, None])
        self._seen: list[tuple[Tensor, Tensor]] = []

    def seen(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        self._seen.append((key, value))
        return key, value, None

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """[layers, B, g, S, D] each, as the cache has them."""
        keys, values = zip(*self._seen, strict=True)
        return torch.stack(keys).permute(0, 2, 3, 1, 4), torch.stack(values).permute(0, 2, 3, 1, 4)


class NextTokens(RowPass):
    """One token more per row, in a new column of the cache."""

    def __init__(self, cache: KVCache, places: dict[int, int], device: torch.device) -> None:
        """
        Args:
            cache: Of all rows; its next column is opened.
            places: In the cache, by layer number.
            device: Of the model.
        """
        positions = cache.positions()
        at = torch.full((1, 1), positions, device=device) if isinstance(positions, int) else positions[None]
        self._keys, self._values, mask = cache.append()
        self._places = places
        super().__init__(at, mask)

    def seen(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        place = self._places[layer_number]
        keys, values = self._keys[place], self._values[place]
        keys[:, :, -1] = key[0]
        values[:, :, -1] = value[0]
        return keys.permute(2, 0, 1, 3), values.permute(2, 0, 1, 3), None


class NewTokens(RowPass):
    """The last tokens of rows whose earlier ones are in the cache."""

    def __init__(self, recent: Recent, places: dict[int, int]) -> None:
        """
        Args:
            recent: Where they belong.
            places: In the cache, by layer number.
        """
        super().__init__(recent.positions.T, recent.mask)
        self._recent, self._places = recent, places

    def seen(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        new = (tensor.permute(1, 2, 0, 3) for tensor in (key, value))
        keys, values = self._recent.seen(self._places[layer_number], *new)
        return keys.permute(2, 0, 1, 3), values.permute(2, 0, 1, 3), None


class CachedDecoder(CachedRows):
    """A ``Decoder`` over the pieces of a model. All ranks of a copy make the same calls."""

    def __init__(self, stages: Stages, turns: Turns) -> None:
        """
        Args:
            stages: What decodes.
            turns: This rank's part of conversations between their turns.
        """
        layers = [layer for piece in stages.pieces for layer in piece.decoder.layers]
        attention, config = layers[0].self_attention, stages.pieces[0].config
        self._stages = stages
        self._device = torch.device(stages.parallel.device)
        self._places = {layer.layer_number: place for place, layer in enumerate(layers)}
        heads, size = attention.num_query_groups_per_partition, config.kv_channels
        super().__init__(KVCache(len(layers), heads, size, config.params_dtype, self._device), turns)

    def step(self, tokens: Tensor) -> Tensor:
        """[B, V] as ``Stages.logits`` has them."""
        states = self._stages.forward(tokens[:, None], NextTokens(self._cache, self._places, self._device))
        return self._stages.logits(states[0])

    def _go_on(self, ids: Tensor, recent: Recent) -> Tensor:
        return self._stages.logits(self._stages.forward(ids, NewTokens(recent, self._places))[-1])

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        width = max(map(len, prompts))
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        row_pass = Prompts(width, self._device)
        states = self._stages.forward(torch.tensor(padded, device=self._device), row_pass)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        logits = self._stages.logits(states[last, torch.arange(len(prompts), device=self._device)])
        return logits, *row_pass.keys_and_values()
