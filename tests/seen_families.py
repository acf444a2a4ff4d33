"""For tests of families: tiny models, sequences with items, and what transformers itself makes of each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from nemorl.media import PLACE_BITS, Media, MediaKind, is_media, media_by_name, media_runs
from nemorl_dtensor.model_head import Scorer
from nemorl_media.expansion import expanded_prompt
from nemorl_media.family import Family
from nemorl_media.sight import Sight
from nemorl_media.slots import family_of
from nemorl_tensors.batch import TokenBatch
from nemorl_testing.seeing import FAMILIES, drawing, tiny_sight, tune
from torch import Tensor

KINDS = [*FAMILIES]
HEARING = {"qwen2_audio", "qwen2_5_omni_thinker"}
"""Families that take sounds"""
TOLERANCE = 5e-6
"""float32, nats; gradients: of their norm"""


@dataclass
class Seer:
    """A tiny model with its family and tokenizer."""

    kind: str
    model: Any
    family: Family
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @property
    def kinds(self) -> list[MediaKind]:
        return [*self.family.placeholders]

    def media(self, seed: int, size: tuple[int, int] = (90, 60)) -> Media:
        """An item of one of the model's kinds, in turn. A sound is as long in centiseconds as an image is wide."""
        kind = self.kinds[seed % len(self.kinds)]
        return self.family.named(drawing(seed, *size) if kind == "image" else tune(seed, size[0] / 100))

    def chat(self, media: Sequence[Media], text: str) -> str:
        content = [*({"type": item.kind} for item in media), {"type": "text", "text": text}]
        rendered: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return rendered

    def prompt(self, media: Sequence[Media], text: str) -> list[int]:
        decode: Callable[[int], str] = self.tokenizer.convert_ids_to_tokens
        return expanded_prompt(self.chat(media, text), media, self.family, self.encode, decode)

    def in_vocabulary(self, ids: Sequence[int], media: Iterable[Media]) -> list[int]:
        """The ids as the model's own forward pass takes them."""
        known = media_by_name(media)
        stand_ins = self.family.stand_ins
        return [stand_ins[known[token >> PLACE_BITS].kind] if is_media(token) else token for token in ids]

    def scorer(self) -> Scorer:
        return Scorer.find(self.model, sight=Sight(self.model, self.family))

    def own_logprobs(self, ids: Sequence[int], media: Sequence[Media]) -> Tensor:
        """[n] log-prob of each token by transformers' own forward pass of the sequence alone; the first is 0."""
        fed = torch.tensor([self.in_vocabulary(ids, media)])
        known = media_by_name(media)
        shown = [known[ids[start] >> PLACE_BITS] for start, _ in media_runs(ids) if ids[start] % (1 << PLACE_BITS) == 0]
        is_seen = torch.tensor([[is_media(token) for token in ids]])
        inputs = self.family.own_arguments([self.family.item(item) for item in shown], is_seen) if shown else {}
        if inputs.pop("position_ids", None) is not None:  # transformers finds them where it has a mask
            inputs["attention_mask"] = torch.ones_like(fed)
        logits = self.model(input_ids=fed, use_cache=False, **inputs).logits[0, :-1]
        picked = torch.log_softmax(logits.float(), -1).gather(1, fed[0, 1:, None])[:, 0]
        return torch.cat((torch.zeros(1), picked))


@cache
def seer(kind: str) -> Seer:
    """Skips the test where what reads sounds is not installed."""
    if kind in HEARING:
        pytest.importorskip("soundfile")
        pytest.importorskip("soxr")
    from transformers import AutoModelForMultimodalLM, AutoTokenizer

    folder = tiny_sight(kind)
    model = AutoModelForMultimodalLM.from_pretrained(folder).eval()
    family = family_of(model.config, str(folder), {})
    assert family is not None
    return Seer(kind, model, family, AutoTokenizer.from_pretrained(folder))


def conversations(seer: Seer) -> tuple[list[list[int]], list[list[bool]], list[Media]]:
    """Token ids, masks and items: one item, two, none, one repeated, and two answers to one prompt."""
    first, second, third = seer.media(1), seer.media(2, (40, 100)), seer.media(3, (120, 120))
    asked = [
        ([first, second], "what?", " yes it is"),
        ([first, second], "what?", " yes no"),
        ([third], "and?", " never"),
        ([], "no picture", " hm"),
        ([second, second], "what?", " yes"),
    ]
    ids, masks = [], []
    for media, text, answer in asked:
        prompt, said = seer.prompt(media, text), seer.encode(answer)
        ids.append(prompt + said)
        masks.append([False] * len(prompt) + [True] * len(said))
    return ids, masks, [first, second, third]


def batch_of(seer: Seer) -> TokenBatch:
    ids, masks, media = conversations(seer)
    return TokenBatch.from_sequences(ids, masks, media=media)
