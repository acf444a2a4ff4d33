"""Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL: patches are merged, and positions have three dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from nemorl.media import Media
from nemorl_tensors.engines.rows import Rows
from torch import Tensor, nn

from nemorl_media.decoding import pixels
from nemorl_media.family import ImageFamily, Item, Seen, stacked
from nemorl_media.positions import positions_in_3d


class Qwen25VL(ImageFamily):
    """Images; one token per ``spatial_merge_size`` squared patches."""

    towers: ClassVar[Sequence[str]] = ("visual",)
    connectors: ClassVar[Sequence[str]] = ("visual.merger",)

    def process(self, media: Media) -> Item:
        found = self._processor(images=[pixels(media)], return_tensors="pt")
        frames, rows, columns = found["image_grid_thw"][0].tolist()
        merged = self.config.vision_config.spatial_merge_size
        tensors = {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}
        return Item(media, tensors, (frames, rows // merged, columns // merged))

    def encode(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        visual: Any = model.base_model.visual  # type: ignore[union-attr]
        images = stacked(items, "pixel_values").to(visual.dtype)
        return self._seen(visual(images, grid_thw=stacked(items, "image_grid_thw")))

    def _seen(self, found: Any) -> Seen:
        return Seen(found.pooler_output)

    def positions(self, rows: Rows, items: Mapping[int, Item]) -> Tensor:
        return positions_in_3d(rows, {name: item.grid for name, item in items.items()})

    def own_arguments(self, items: Sequence[Item], is_seen_RW: Tensor) -> dict[str, Any]:
        return {**super().own_arguments(items, is_seen_RW), "mm_token_type_ids": is_seen_RW.int()}

    def width(self, item: Item) -> int:
        return max(item.grid)

    def arguments(self, model: nn.Module, rows: Rows, items: Mapping[int, Item]) -> dict[str, Any]:
        if not items and rows.position_ids is None:
            return {}
        positions_3RW = self.positions(rows, items)
        if rows.position_ids is None:
            return {"position_ids": positions_3RW}
        # The first of four restarts where sequences do: transformers cuts attention there.
        return {"position_ids": torch.cat((rows.position_ids[None], positions_3RW))}


class Qwen3VL(Qwen25VL):
    """The same, with features of several depths of the tower for the first layers of the decoder."""

    connectors: ClassVar[Sequence[str]] = ("visual.merger", "visual.deepstack_merger_list")

    def _seen(self, found: Any) -> Seen:
        return Seen(found.pooler_output, tuple(found.deepstack_features))

    def deep_arguments(self, is_seen_RW: Tensor, deeper: Sequence[Tensor]) -> dict[str, Any]:
        return {"visual_pos_masks": is_seen_RW, "deepstack_visual_embeds": list(deeper)}
