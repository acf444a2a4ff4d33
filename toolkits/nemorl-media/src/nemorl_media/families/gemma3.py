"""Gemma 3 (arXiv:2503.19786): tokens of an image attend to one another in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from nemorl.errors import BackendError
from nemorl.media import FIRST_ID, Media, MediaKind
from nemorl_tensors.engines.rows import Rows
from torch import Tensor, nn

from nemorl_media.decoding import pixels
from nemorl_media.family import ImageFamily, Item, Seen, stacked

START, END = "<start_of_image>", "<end_of_image>"


class Gemma3(ImageFamily):
    """Images of one size; with ``do_pan_and_scan`` also parts of long ones, as images of their own."""

    towers: ClassVar[Sequence[str]] = ("vision_tower",)
    connectors: ClassVar[Sequence[str]] = ("multi_modal_projector",)
    is_causal: ClassVar[bool] = False

    @property
    def placeholders(self) -> Mapping[MediaKind, int]:
        return {"image": self.config.boi_token_index}

    @property
    def stand_ins(self) -> Mapping[MediaKind, int]:
        return {"image": self.config.image_token_id}

    def process(self, media: Media) -> Item:
        images = self._processor(images=[[pixels(media)]], return_tensors="pt")["pixel_values"]
        side = int(self.config.mm_tokens_per_image**0.5)
        return Item(media, {"pixel_values": images}, (len(images), side, side))

    def pieces(self, item: Item) -> Sequence[str | range]:
        return [*self._pieces(item)]

    def _pieces(self, item: Item) -> Iterator[str | range]:
        ids, of_image = item.media.token_ids(item.tokens), self.config.mm_tokens_per_image
        parts = item.grid[0] - 1
        before = "Here is the original image " if parts else ""
        for part in range(parts + 1):
            yield f"{before}\n\n{START}"
            yield ids[part * of_image : (part + 1) * of_image]
            yield f"{END}\n\n"
            before = " " if part else " and here are some crops to help you see better "

    def encode(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        base: Any = model.base_model
        images = stacked(items, "pixel_values").to(base.vision_tower.dtype)
        return Seen(base.get_image_features(images).pooler_output.flatten(0, 1))

    def arguments(self, model: nn.Module, rows: Rows, items: Mapping[int, Item]) -> dict[str, Any]:
        usual = super().arguments(model, rows, items)
        if not items:
            return usual
        if rows.tree is not None:
            raise BackendError(
                "Gemma 3 attends to an image in both directions, which the shared layout cannot",
                fix="set policy.backend.layout: auto",
            )
        return {**usual, "attention_mask": _masks(model, rows.input_ids, rows.position_ids, None)}

    def own_arguments(self, items: Sequence[Item], is_seen_RW: Tensor) -> dict[str, Any]:
        return {**super().own_arguments(items, is_seen_RW), "token_type_ids": is_seen_RW.long()}

    def attention(self, model: nn.Module, ids_UP: Tensor, is_real_UP: Tensor | None) -> Any:
        if not bool((ids_UP >= FIRST_ID).any()):
            return super().attention(model, ids_UP, is_real_UP)
        return _masks(model, ids_UP, None, is_real_UP)


def _masks(model: Any, ids_RW: Tensor, positions_RW: Tensor | None, is_real_RW: Tensor | None) -> Any:
    """Attention of each kind of layer, in which the tokens of an image see one another."""
    from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    return create_masks_for_vision_model(
        config=model.config.get_text_config(),
        # Of these it reads shape, precision and device.
        inputs_embeds=torch.empty((*ids_RW.shape, 0), dtype=model.dtype, device=ids_RW.device),
        attention_mask=None if is_real_RW is None else is_real_RW.long(),
        past_key_values=None,
        position_ids=positions_RW,
        block_sequence_ids=image_blocks(ids_RW),
    )


def image_blocks(ids_RW: Tensor) -> Tensor:
    """[R, W] number of the run of an item's tokens, counted along the row; -1 elsewhere."""
    is_item = ids_RW >= FIRST_ID
    goes_on = nn.functional.pad(ids_RW[:, 1:] == ids_RW[:, :-1] + 1, (1, 0))
    return torch.where(is_item, (is_item & ~goes_on).cumsum(1) - 1, -1)
