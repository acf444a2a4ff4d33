"""Family: how one family of models turns images and sounds into tokens and embeddings.

# I = items, P = their tokens together, D = hidden size of the decoder, R = rows, W = row width

A family is a class in a file of its own, found by the model's ``model_type`` (slot ``media_family``).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from nemorl.errors import BackendError, DataError, boundary
from nemorl.media import MAX_TOKENS, Media, MediaKind
from nemorl_tensors.engines.rows import Rows
from torch import Tensor, nn

CACHE_BYTES = 512 * 2**20
"""Of processed items that a process keeps."""
Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens of its own."""


@dataclass(frozen=True)
class Item:
    """An image or a sound, processed."""

    media: Media
    tensors: Mapping[str, Tensor]
    """What the encoder takes, by the names of the model's forward pass; the first dimension may be stacked"""
    grid: tuple[int, int, int]
    """Its tokens: frames, rows, columns"""

    @property
    def tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


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

    def __init__(self, config: Any, model_name: str, settings: Mapping[str, Any]) -> None:
        """
        Args:
            config: The model's transformers config.
            model_name: Folder or hub name, for the settings of its processor.
            settings: Changes to these.
        """
        self.config, self.model_name, self.settings = config, model_name, dict(settings)
        self._items: OrderedDict[str, Item] = OrderedDict()
        self._held = 0
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

    def expanded(self, item: Item, encode: Encode) -> list[int]:
        """The ids that stand for an item where the template wrote its placeholder."""
        return list(item.media.token_ids(item.tokens))

    def arguments(self, rows: Rows, items: Mapping[int, Item]) -> dict[str, Any]:
        """What the decoder is given besides embeddings: positions, by default those of the rows.

        Args:
            rows: With the ids of items.
            items: Those in them, by name.
        """
        return {} if rows.position_ids is None else {"position_ids": rows.position_ids}

    def deep_arguments(self, is_seen_RW: Tensor, deeper: Sequence[Tensor]) -> dict[str, Any]:
        """How the decoder is given what is added after its first layers, [P, D] each in the order of the positions."""
        raise NotImplementedError("a family whose encoder has such features says how its decoder takes them")

    # What all families share

    def named(self, media: Media) -> Media:
        """The item with the digest of what this model is shown of it: data and settings."""
        digest = hashlib.sha256(self._fingerprint + bytes.fromhex(Media(media.kind, media.data).digest)).hexdigest()
        return replace(media, digest=digest)

    def item(self, media: Media) -> Item:
        """It, processed; from memory where it was lately.

        Raises:
            DataError: It cannot be decoded, the model does not know its kind, or it has too many tokens.
        """
        found = self._items.get(media.digest)
        if found is None:
            if media.kind not in self.placeholders:
                known = " and ".join(self.placeholders)
                raise DataError(f"the model takes {known}, not {media.kind}", fix="leave such rows out")
            with boundary(f"processing {media}", passing=(DataError,)):
                found = self.process(media)
            if not 0 < found.tokens <= MAX_TOKENS:
                raise DataError(
                    f"{media} makes {found.tokens} tokens, at most {MAX_TOKENS} are possible",
                    fix="lower the size in policy.media.processor, e.g. max_pixels",
                )
            self._items[media.digest] = found
            self._held += found.nbytes
            while self._held > CACHE_BYTES and len(self._items) > 1:
                self._held -= self._items.popitem(last=False)[1].nbytes
        else:
            self._items.move_to_end(media.digest)
        return found

    def part_names(self, model: nn.Module) -> dict[str, list[str]]:
        """Full names of modules: ``towers`` and ``connectors`` of a model."""
        known = [name for name, _ in model.named_modules()]

        def of(parts: Sequence[str]) -> list[str]:
            return [name for name in known if any(name == part or name.endswith(f".{part}") for part in parts)]

        return {"towers": of(self.towers), "connectors": of(self.connectors)}


def stacked(items: Sequence[Item], name: str) -> Tensor:
    """One tensor of all items, along the first dimension."""
    return torch.cat([item.tensors[name] for item in items])


def image_processor(model_name: str, settings: Mapping[str, Any]) -> Any:
    """transformers' image processor of a model, on Pillow where torchvision is absent.

    Raises:
        BackendError: The model has none, or it knows none of these settings.
    """
    from transformers import AutoImageProcessor

    with boundary(f"the image processor of {model_name!r}"):
        found: Any = AutoImageProcessor.from_pretrained(model_name, **settings)  # type: ignore[no-untyped-call]
    unknown = [name for name in settings if not hasattr(found, name)]
    if unknown:
        raise BackendError(
            f"the image processor {type(found).__name__} has no setting {', '.join(unknown)}",
            fix="see preprocessor_config.json of the model for those of policy.media.processor",
        )
    return found
