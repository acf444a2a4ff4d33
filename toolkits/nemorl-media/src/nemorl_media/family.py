"""Family: how one family of models turns images and sounds into tokens and embeddings.

# I = items, P = their tokens together, D = hidden size of the decoder, R = rows, W = row width

A family is a class in a file of its own, found by the model's ``model_type`` (slot ``media_family``).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from nemorl.errors import BackendError, DataError, boundary
from nemorl.media import MAX_TOKENS, Media, MediaKind
from nemorl_tensors.engines.rows import Rows
from torch import Tensor, nn

from nemorl_media.kept_items import KeptItems, one_copy

CACHE_BYTES = 512 * 2**20
"""Of processed items that a process keeps."""
MOST_OUTLINES = 100_000
"""Items whose sizes a process keeps, each less than a KB: far more than it keeps processed"""
Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens of its own."""


@dataclass(frozen=True)
class Item:
    """An image or a sound, processed."""

    media: Media
    tensors: Mapping[str, Tensor]
    """What the encoder takes, by the names of the model's forward pass; the first dimension may be stacked"""
    grid: tuple[int, int, int]
    """Its tokens: frames (or tiles), rows, columns"""
    tiling: tuple[int, int] = (0, 0)
    """Rows and columns of tiles, where an image is cut into tiles"""

    @property
    def tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class _Outline:
    item: Item
    nbytes: int = 1


@dataclass(frozen=True)
class Seen:
    """What an encoder makes of items."""

    embeds: Tensor
    """[P, D] one per token, items one after the other"""
    deeper: tuple[Tensor, ...] = ()
    """[P, D] each: what is added to the states after the first layers (DeepStack, arXiv:2406.04334)"""


class Family(ABC):
    """One model's processing and encoder. One per process and model; it keeps what it has processed lately."""

    towers: ClassVar[Sequence[str]]
    """Parts of the model (names of modules below its base model) that see or hear"""
    connectors: ClassVar[Sequence[str]] = ()
    """Parts that bring what they see to the decoder's size, outside of the towers or within them"""
    is_causal: ClassVar[bool] = True
    """No token of an item attends to those after it"""

    def __init__(self, config: Any, model_name: str, settings: Mapping[str, Any]) -> None:
        """
        Args:
            config: The model's transformers config.
            model_name: Folder or hub name, for the settings of its processor.
            settings: Changes to these.
        """
        self.config, self.model_name, self.settings = config, model_name, dict(settings)
        self._items = KeptItems[Item](CACHE_BYTES)
        self._outlines = KeptItems[_Outline](MOST_OUTLINES)
        text = json.dumps([config.model_type, self.settings], sort_keys=True, default=str)
        self._fingerprint = hashlib.sha256(text.encode()).digest()

    @property
    @abstractmethod
    def placeholders(self) -> Mapping[MediaKind, int]:
        """The token that the chat template writes for an item of each kind that the model knows."""

    @abstractmethod
    def process(self, media: Media) -> Item:
        """Decode an item and bring it into the form that the encoder takes."""

    @abstractmethod
    def encode(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        """Run the encoder.

        Args:
            model: The whole model.
            items: At least one, on the model's device.
        """

    @property
    def stand_ins(self) -> Mapping[MediaKind, int]:
        """The token that the model's own forward pass takes for each token of an item."""
        return self.placeholders

    def pieces(self, item: Item) -> Sequence[str | range]:
        """What stands for an item where the template wrote its placeholder: text, and the ids of the item."""
        return (item.media.token_ids(item.tokens),)

    def arguments(self, model: nn.Module, rows: Rows, items: Mapping[int, Item]) -> dict[str, Any]:
        """What the decoder is given besides embeddings: positions, by default those of the rows.

        Args:
            model: The whole model.
            rows: With the ids of items.
            items: Those in them, by name.
        """
        return {} if rows.position_ids is None else {"position_ids": rows.position_ids}

    def positions(self, rows: Rows, items: Mapping[int, Item]) -> Tensor:
        """Positions of rows that say those of their tokens, [R, W] or [dimensions, R, W]."""
        assert rows.position_ids is not None, "rows that are decoded say them"
        return rows.position_ids

    def own_arguments(self, items: Sequence[Item], is_seen_RW: Tensor) -> dict[str, Any]:
        """What the model's own forward pass is given besides tokens, by which this family is checked.

        Args:
            items: Of one row, in order; at least one.
            is_seen_RW: [1, W] True at their tokens.
        """
        return {name: stacked(items, name) for name in items[0].tensors}

    def attention(self, model: nn.Module, ids_UP: Tensor, is_real_UP: Tensor | None) -> Any:
        """What the decoder is told of the attention within prompts that are padded on the left.

        Args:
            model: The whole model.
            ids_UP: With the ids of items.
            is_real_UP: False on padding; ``None`` where there is none.
        """
        return None if is_real_UP is None else is_real_UP.long()

    def width(self, item: Item) -> int:
        """Positions that an item takes up."""
        return item.tokens

    def deep_arguments(self, is_seen_RW: Tensor, deeper: Sequence[Tensor]) -> dict[str, Any]:
        """How the decoder is given what is added after its first layers, [P, D] each in the order of the positions."""
        raise NotImplementedError("a family whose encoder has such features says how its decoder takes them")

    # What all families share

    def named(self, media: Media) -> Media:
        """The item with the digest of what this model is shown of it: data and settings.

        Raises:
            DataError: The model does not know its kind.
        """
        if media.kind not in self.placeholders:
            known = " and ".join(self.placeholders)
            raise DataError(f"the model takes {known}, not {media.kind}", fix="leave it out, or use another model")
        digest = hashlib.sha256(self._fingerprint + bytes.fromhex(Media(media.kind, media.data).digest)).hexdigest()
        return one_copy(replace(media, digest=digest))

    def item(self, media: Media) -> Item:
        """It, processed; from memory where it was lately.

        Raises:
            DataError: It cannot be decoded, or it has too many tokens.
        """
        return self._items.made(media.digest, lambda: self._processed(media))

    def outline(self, media: Media) -> Item:
        """It, without its data: its size alone, by which prompts are written. Raises as ``item`` does."""

        def made() -> _Outline:
            found = self.item(media)
            return _Outline(replace(found, media=Media(media.kind, b"", media.digest), tensors={}))

        return self._outlines.made(media.digest, made).item

    def _processed(self, media: Media) -> Item:
        with boundary(f"processing {media}", passing=(DataError, BackendError)):
            found = self.process(media)
        if not found.tokens:
            raise DataError(f"{media} is too small or too short for a token", fix="leave it out")
        if found.tokens > MAX_TOKENS:
            raise DataError(
                f"{media} makes {found.tokens} tokens, at most {MAX_TOKENS} are possible",
                fix="lower the size in policy.media.processor, e.g. max_pixels",
            )
        return found

    def tower_names(self, model: nn.Module) -> list[str]:
        """Full names of the modules of ``model`` that see or hear."""
        return _named(model, self.towers)

    def connector_names(self, model: nn.Module) -> list[str]:
        """Those that connect them to the decoder."""
        return _named(model, self.connectors)

    def blank(self, kind: MediaKind | None = None) -> Item:
        """Some item, for a pass of the encoder that nobody looks at; by default of the first kind."""
        from nemorl_media.blanks import BLANKS

        return self.item(self.named(BLANKS[next(iter(self.placeholders)) if kind is None else kind]()))


class ImageFamily(Family):
    """A family that sees and does not hear."""

    @property
    def placeholders(self) -> Mapping[MediaKind, int]:
        return {"image": self.config.image_token_id}

    @cached_property
    def _processor(self) -> Any:
        return image_processor(self.model_name, self.settings)


def _named(model: nn.Module, parts: Sequence[str]) -> list[str]:
    known = (name for name, _ in model.named_modules())
    return [name for name in known if any(name == part or name.endswith(f".{part}") for part in parts)]


def stacked(items: Sequence[Item], name: str) -> Tensor:
    """One tensor of all items, along the first dimension."""
    return torch.cat([item.tensors[name] for item in items])


def image_processor(model_name: str, settings: Mapping[str, Any]) -> Any:
    """transformers' image processor of a model, on Pillow where torchvision is absent.

    Raises:
        BackendError: The model has none, or it knows none of these settings.
    """
    from transformers import AutoImageProcessor

    return _configured(AutoImageProcessor, model_name, settings)


def feature_extractor(model_name: str, settings: Mapping[str, Any]) -> Any:
    """transformers' extractor of a model that hears.

    Raises:
        BackendError: The model has none, or it knows none of these settings.
    """
    from transformers import AutoFeatureExtractor

    return _configured(AutoFeatureExtractor, model_name, settings)


def _configured(kind: Any, model_name: str, settings: Mapping[str, Any]) -> Any:
    with boundary(f"the processor of {model_name!r}"):
        found = kind.from_pretrained(model_name, **settings)
    # Some are old names of parts of others, e.g. max_pixels of size.
    taken = getattr(getattr(found, "valid_kwargs", None), "__annotations__", {})
    unknown = [name for name in settings if not hasattr(found, name) and name not in taken]
    if unknown:
        raise BackendError(
            f"the processor {type(found).__name__} has no setting {', '.join(unknown)}",
            fix="see preprocessor_config.json of the model for those of policy.media.processor",
        )
    return found
