"""Sight: from rows of ids to what the decoder of a model that sees is given.

# R = rows, W = row width, P = tokens of all items, D = hidden size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from nemorl.media import FIRST_ID, MAX_TOKENS, PLACE_BITS, Media
from nemorl_tensors.engines.rows import PAD_ID, Rows
from torch import Tensor, nn

from nemorl_media.family import Family, Item


@dataclass(frozen=True)
class Sight:
    """A model and its family."""

    model: Any
    """The whole of it, as transformers builds it"""
    family: Family

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Arguments of the decoder's forward pass. Each item is encoded once, wherever and however often it stands."""
        items = self.items(rows.media)
        return {**self.embedded(rows.input_ids, items), **self.family.arguments(self.model, rows, items)}

    def items(self, media: Mapping[int, Media]) -> dict[int, Item]:
        """These items processed, on the model's device, in the order of their names."""
        return {name: self._on_device(self.family.item(media[name])) for name in sorted(media)}

    def embedded(self, ids: Tensor, items: dict[int, Item]) -> dict[str, Any]:
        """[R, W] ids, of which those of items are replaced by what the encoder makes of these."""
        if not items:
            return {"input_ids": ids}
        extra: dict[str, Any] = {}
        is_seen_RW = ids >= FIRST_ID
        embeds_RWD = self.model.get_input_embeddings()(torch.where(is_seen_RW, PAD_ID, ids))
        seen = self.family.encode(self.model, list(items.values()))
        places = self._places(ids[is_seen_RW], items)
        embeds_RWD = embeds_RWD.masked_scatter(is_seen_RW[..., None], seen.embeds[places].to(embeds_RWD.dtype))
        if seen.deeper:
            extra |= self.family.deep_arguments(is_seen_RW, [part[places] for part in seen.deeper])
        return {"inputs_embeds": embeds_RWD, **extra}

    def idle(self, media: Mapping[int, Media]) -> Tensor | float:
        """Passes that nobody looks at, of what encodes the kinds that these items are not: a zero that leads back to
        its parameters."""
        kinds = {item.kind for item in media.values()}
        blanks = [self._on_device(self.family.blank(kind)) for kind in self.family.placeholders if kind not in kinds]
        if not blanks:
            return 0.0
        seen = self.family.encode(self.model, blanks)
        return sum((part.sum() * 0.0 for part in seen.deeper), seen.embeds.sum() * 0.0)

    def _places(self, ids: Tensor, items: dict[int, Item]) -> Tensor:
        """Rows of the encoder's output that these tokens of items are."""
        names = torch.tensor(list(items), dtype=torch.int64, device=ids.device)
        counts = torch.tensor([item.tokens for item in items.values()], dtype=torch.int64, device=ids.device)
        firsts = counts.cumsum(0) - counts
        return firsts[torch.searchsorted(names, ids >> PLACE_BITS)] + (ids & (MAX_TOKENS - 1))

    def _on_device(self, item: Item) -> Item:
        device = self.model.device
        return replace(item, tensors={name: tensor.to(device) for name, tensor in item.tensors.items()})


def freeze(model: nn.Module, family: Family, trained: Sequence[str]) -> None:
    """Leave towers and connectors as they are, but for those that are named.

    Args:
        model: Whose parameters are trained unless frozen here.
        family: Its own.
        trained: Of ``tower`` and ``connector``.
    """
    # A connector may be a part of the tower.
    for kind, names in (("tower", family.tower_names(model)), ("connector", family.connector_names(model))):
        for name in names:
            model.get_submodule(name).requires_grad_(kind in trained)
