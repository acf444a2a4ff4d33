"""Qwen2-Audio (arXiv:2407.10759): sounds of up to half a minute, a token for each 40 ms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from nemorl.media import Media, MediaKind
from torch import Tensor, nn

from nemorl_media.audio import samples
from nemorl_media.family import Family, Item, Seen, feature_extractor, stacked


class Qwen2Audio(Family):
    """Sounds, as spectrograms of Whisper (arXiv:2212.04356)."""

    towers: ClassVar[Sequence[str]] = ("audio_tower",)
    connectors: ClassVar[Sequence[str]] = ("multi_modal_projector",)

    @property
    def placeholders(self) -> Mapping[MediaKind, int]:
        return {"audio": self.config.audio_token_id}

    @cached_property
    def _extractor(self) -> Any:
        return feature_extractor(self.model_name, self.settings)

    def process(self, media: Media) -> Item:
        # The extractor would cut what is longer.
        features, frames = spectrogram(self._extractor, media, self._extractor.chunk_length)
        tensors = {"input_features": features, "feature_attention_mask": frames}
        return Item(media, tensors, (int(states_and_tokens(frames)[1]), 1, 1))

    def encode(self, model: nn.Module, items: Sequence[Item]) -> Seen:
        from transformers.masking_utils import create_bidirectional_mask

        base: Any = model.base_model
        sounds = stacked(items, "input_features").to(base.audio_tower.dtype)
        states_I, tokens_I = states_and_tokens(stacked(items, "feature_attention_mask"))
        width = (sounds.shape[-1] - 1) // 2 + 1
        mask = create_bidirectional_mask(
            config=base.audio_tower.config,
            inputs_embeds=sounds.new_empty((len(items), width, 0)),
            attention_mask=_first(states_I, width).long(),
        )
        states = base.audio_tower(sounds, attention_mask=mask).last_hidden_state
        return Seen(base.multi_modal_projector(states)[_first(tokens_I, states.shape[1])])


def spectrogram(extractor: Any, media: Media, max_s: float) -> tuple[Tensor, Tensor]:
    """[1, mels, T] features of a sound, filled up to the extractor's longest, and [1, T] int: frames of its own."""
    rate = extractor.sampling_rate
    found = extractor(
        [samples(media, rate, max_s)],
        sampling_rate=rate,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    return found["input_features"], found["attention_mask"]


def states_and_tokens(frames_IT: Tensor) -> tuple[Tensor, Tensor]:
    """[I] states of the tower and tokens of sounds, from the frames that are theirs: two convolutions halve them."""
    states_I = (frames_IT.sum(-1) - 1) // 2 + 1
    return states_I, (states_I - 2) // 2 + 1


def _first(counts_I: Tensor, width: int) -> Tensor:
    """[I, width] bool, the first of each row."""
    return torch.arange(width, device=counts_I.device) < counts_I[:, None]
