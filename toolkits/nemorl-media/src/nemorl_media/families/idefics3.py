"""Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): an image is a grid of tiles and a small copy of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from nemorl.media import Media
from torch import Tensor, nn

from nemorl_media.decoding import pixels
from nemorl_media.family import ImageFamily, Item, Seen, stacked

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(ImageFamily):
    """Images; as many tokens for each tile, whose row and column are written before them."""

    towers: ClassVar[Sequence[str]] = ("vision_model",)
    connectors: ClassVar[Sequence[str]] = ("connector",)

    @property
    def _side(self) -> int:
        """Tokens along each side of a tile."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size // self.config.scale_factor)

    def process(self, media: Media) -> Item:
        found = self._processor(images=[[pixels(media)]], do_pad=True, return_row_col_info=True, return_tensors="pt")
        tensors = {name: found[name][0] for name in ("pixel_values", "pixel_attention_mask")}
        grid = (len(tensors["pixel_values"]), self._side, self._side)
        return Item(media, tensors, grid, tiling=(found["rows"][0][0], found["cols"][0][0]))

    def pieces(self, item: Item) -> Sequence[str | range]:
        return [*self._pieces(item)]

    def _pieces(self, item: Item) -> Iterator[str | range]:
        (rows, columns), of_tile = item.tiling, self._side**2
        runs = (item.media.token_ids(item.tokens)[start : start + of_tile] for start in range(0, item.tokens, of_tile))
        for row in range(rows):
            for column in range(columns):
                yield f"{AROUND}<row_{row + 1}_col_{column + 1}>"
                yield next(runs)
            yield "\n"
        yield f"\n{AROUND}{WHOLE}" if rows else f"{AROUND}{WHOLE}"
        yield next(runs)
        yield AROUND

    def own_arguments(self, items: Sequence[Item], is_seen_RW: Tensor) -> dict[str, Any]:
        return {name: tensor[None] for name, tensor in super().own_arguments(items, is_seen_RW).items()}

    def encode(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        base: Any = model.base_model
        tiles, is_image = stacked(items, "pixel_values"), stacked(items, "pixel_attention_mask")
        states = base.vision_model(
            pixel_values=tiles.to(base.vision_model.dtype),
            patch_attention_mask=_patches(is_image, self.config.vision_config.patch_size),
        ).last_hidden_state
        return Seen(base.connector(states).flatten(0, 1))


def _patches(is_image_THW: Tensor, size: int) -> Tensor:
    """[T, H / size, W / size] bool: the patch of a tile shows any of the image."""
    return nn.functional.max_pool2d(is_image_THW.float(), size).bool()
