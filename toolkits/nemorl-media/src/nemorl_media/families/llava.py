"""LLaVA (arXiv:2310.03744): a tower like CLIP's sees an image of one size, a token for each patch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from nemorl.errors import BackendError
from nemorl.media import Media
from torch import nn

from nemorl_media.decoding import pixels
from nemorl_media.family import ImageFamily, Item, Seen, stacked

CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""States of a tower that are of no patch, by its ``model_type``."""


class Llava(ImageFamily):
    """Images, scaled and cropped to the size of the tower."""

    towers: ClassVar[Sequence[str]] = ("vision_tower",)
    connectors: ClassVar[Sequence[str]] = ("multi_modal_projector",)

    def process(self, media: Media) -> Item:
        images = self._processor(images=[pixels(media)], return_tensors="pt")["pixel_values"]
        patch, side = self.config.vision_config.patch_size, self.config.vision_config.image_size
        if images.shape[-2:] != (side, side):
            raise BackendError(
                f"the processor makes images of {images.shape[-1]} x {images.shape[-2]} pixels, and the tower sees "
                f"{side} x {side}",
                fix="leave do_center_crop, crop_size and size of policy.media.processor as the model has them",
            )
        rows, columns = images.shape[-2] // patch, images.shape[-1] // patch
        tokens = rows * columns + self._other_tokens()
        return Item(media, {"pixel_values": images}, (1, rows, columns) if tokens == rows * columns else (1, 1, tokens))

    def _other_tokens(self) -> int:
        """Tokens of an image beyond those of its patches; -1 where a patch is taken for the tower's class."""
        tower: str = self.config.vision_config.model_type
        is_cut: bool = self.config.vision_feature_select_strategy == "default"
        if tower not in CLASS_TOKENS:
            raise BackendError(
                f"how many tokens the tower {tower} of a LLaVA model makes of an image is not known",
                fix=f"use a model whose tower is one of {', '.join(CLASS_TOKENS)}",
            )
        return CLASS_TOKENS[tower] - is_cut

    def encode(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        base: Any = model.base_model
        images = stacked(items, "pixel_values").to(base.vision_tower.dtype)
        return Seen(torch.cat([*base.get_image_features(images).pooler_output]))
