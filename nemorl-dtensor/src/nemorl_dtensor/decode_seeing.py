"""Decoding by a model that sees or hears: its encoder runs once per item, then the decoder's own cache.

# U = distinct prompts, P = prompt tokens, R = rows, V = vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nemorl.media import PLACE_BITS, Media, media_runs
from nemorl_media.family import Item
from nemorl_media.sight import Sight
from nemorl_tensors.engines.rows import Rows
from torch import Tensor

from nemorl_dtensor.decode_hf import HFDecoder
from nemorl_dtensor.model_head import Scorer
from nemorl_dtensor.routing import Routers


class SeeingDecoder(HFDecoder):
    """``HFDecoder`` through the parts of the model: embeddings with items in them, the decoder, the head."""

    def __init__(self, sight: Sight, routers: Routers | None = None) -> None:
        super().__init__(sight.model, routers)
        self._sight, self._scorer = sight, Scorer.find(sight.model, sight=sight)
        self._items: dict[int, Item] = {}
        """Of the prompts that are being admitted"""

    def admit(self, prompts: Sequence[tuple[int, ...]], reserve_tokens: int, media: Mapping[int, Media]) -> Tensor:
        self._items = self._sight.items(media)
        logits = super().admit(prompts, reserve_tokens, media)
        saved = torch.tensor([self._saved(prompt) for prompt in prompts], device=self._lengths.device)
        self._lengths = self._lengths - saved  # from here on they are positions
        self._items = {}
        return logits

    def _saved(self, prompt: tuple[int, ...]) -> int:
        """Tokens of a prompt less the positions that they take up."""
        shown = [self._items[prompt[start] >> PLACE_BITS] for start, _ in media_runs(prompt)]
        return sum(item.tokens - self._sight.family.width(item) for item in shown)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        rows = Rows(ids, positions, torch.empty(0), torch.empty(0), torch.empty(0))
        options: dict[str, Any] = self._sight.embedded(ids, self._items)
        options["position_ids"] = self._sight.family.positions(rows, self._items)
        family, model = self._sight.family, self._sight.model
        if ids.shape[1] > 1:
            options["attention_mask"] = family.attention(model, ids, self._mask)
        elif self._mask is not None:
            options["attention_mask"] = self._mask.long()
        output = self._scorer.decoder(use_cache=True, past_key_values=self._cache, **options)
        self._cache = output.past_key_values
        return self._scorer.logits(output.last_hidden_state[:, -1])
