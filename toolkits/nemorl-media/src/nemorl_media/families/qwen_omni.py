"""The thinker of Qwen2.5-Omni (arXiv:2503.20215): what sees, hears and writes. What speaks is not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from nemorl.media import Media, MediaKind
from nemorl_tensors.engines.rows import Rows
from torch import Tensor, nn

from nemorl_media.families.qwen2_audio import spectrogram, states_and_tokens
from nemorl_media.families.qwen_vl import Qwen25VL
from nemorl_media.family import Item, Seen, feature_extractor

MAX_SOUND_S = 300.0
"""Of a sound, as its authors process them."""


class Qwen25Omni(Qwen25VL):
    """Images as Qwen2.5-VL, and sounds, a token for each 40 ms, with the positions of text. Settings are of images."""

    towers: ClassVar[Sequence[str]] = ("visual", "audio_tower")
    connectors: ClassVar[Sequence[str]] = ("visual.merger", "audio_tower.proj")

    @property
    def placeholders(self) -> Mapping[MediaKind, int]:
        return {"image": self.config.image_token_id, "audio": self.config.audio_token_id}

    @cached_property
    def _extractor(self) -> Any:
        return feature_extractor(self.model_name, {})

    def process(self, media: Media) -> Item:
        if media.kind == "image":
            return super().process(media)
        features, frames = spectrogram(self._extractor, media, min(MAX_SOUND_S, self._extractor.chunk_length))
        # The tower takes the frames of the sound alone.
        frames = frames[:, : int(frames.sum())]
        tensors = {"input_features": features[..., : frames.shape[1]].clone(), "feature_attention_mask": frames}
        return Item(media, tensors, (int(states_and_tokens(frames)[1]), 1, 1))

    def encode(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        images = [item for item in items if item.media.kind == "image"]
        sounds = [item for item in items if item.media.kind == "audio"]
        parts: dict[int, Tensor] = {}
        for group, run in ((images, super().encode), (sounds, self._hear)):
            if group:
                embeds = torch.split(run(model, group).embeds, [item.tokens for item in group])
                parts |= {item.media.name: part for item, part in zip(group, embeds, strict=True)}
        return Seen(torch.cat([parts[item.media.name] for item in items]))

    def _hear(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        tower: Any = model.audio_tower
        frames_I = torch.tensor([item.tensors["input_features"].shape[-1] for item in items], device=tower.device)
        sounds = torch.cat([item.tensors["input_features"][0] for item in items], 1).to(tower.dtype)
        states = tower(sounds, feature_lens=frames_I, aftercnn_lens=(frames_I - 1) // 2 + 1)
        return Seen(states.last_hidden_state)

    def positions(self, rows: Rows, items: Mapping[int, Item]) -> Tensor:
        return super().positions(rows, {name: item for name, item in items.items() if item.media.kind == "image"})

    def own_arguments(self, items: Sequence[Item], is_seen_RW: Tensor) -> dict[str, Any]:
        found = {
            name: padded([item.tensors[name] for item in items if name in item.tensors])
            for name in {name: None for item in items for name in item.tensors}
        }
        # Without positions it would find items by the markers around them, which a check leaves out.
        ids = torch.zeros_like(is_seen_RW, dtype=torch.int64)
        ids[is_seen_RW] = torch.tensor(
            [token for item in items for token in item.media.token_ids(item.tokens)], device=ids.device
        )
        none = ids.new_empty(0)
        known = {item.media.name: item for item in items}
        return {**found, "position_ids": self.positions(Rows(ids, None, none, none, none), known)}

    def width(self, item: Item) -> int:
        return super().width(item) if item.media.kind == "image" else item.tokens


def padded(parts: Sequence[Tensor]) -> Tensor:
    """All of them one after the other, filled up with zeros to the longest last dimension."""
    width = max(part.shape[-1] for part in parts)
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts])
