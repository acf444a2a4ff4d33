"""Made-up episodes with images and sounds."""

from __future__ import annotations

import io
import math
import struct
import wave
from collections.abc import Sequence

from nemorl.media import Media, is_media
from nemorl.types import Branch, Prompt, Sample, Score
from PIL import Image, ImageDraw


def picture(seed: int, width: int = 90, height: int = 60) -> Media:
    """A drawing, another one for each seed."""
    image = Image.new("RGB", (width, height), (40 * seed % 256, 90, 200 - 30 * seed % 200))
    ImageDraw.Draw(image).ellipse((8, 8, width - 20, height - 8), fill=(250, 210, 20 * seed % 256))
    file = io.BytesIO()
    image.save(file, "PNG")
    return Media("image", file.getvalue())


def tone(seconds: float = 0.5) -> Media:
    """A sound of 440 Hz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        count = int(8000 * seconds)
        sound.writeframes(struct.pack(f"<{count}h", *(int(9e3 * math.sin(0.3456 * n)) for n in range(count))))
    return Media("audio", file.getvalue())


def decode(ids: Sequence[int]) -> str:
    """Tokens are characters; images and sounds have none."""
    return "".join(chr(token) for token in ids if not is_media(token))


def parts(*given: str | tuple[Media, int]) -> tuple[int, ...]:
    """Token ids of text, and of items with so many tokens."""
    ids: list[int] = []
    for part in given:
        ids += map(ord, part) if isinstance(part, str) else part[0].token_ids(part[1])
    return tuple(ids)


def episode(
    prompt: Sequence[str | tuple[Media, int]],
    response: str = "2",
    *then: Sequence[str | tuple[Media, int]],
    index: int = 0,
    reward: float = 1.0,
    branches: Sequence[Branch] = (),
    more: Sequence[Media] = (),
) -> Sample:
    """A prompt, a response to it, and an observation and a further response for each of ``then``."""
    asked = parts(*prompt)
    ids, mask = [*asked, *map(ord, response)], [False] * len(asked) + [True] * len(response)
    for observed in then:
        seen = parts(*observed)
        ids, mask = [*ids, *seen, ord("y")], [*mask, *[False] * len(seen), True]
    shown = tuple(part[0] for part in prompt if not isinstance(part, str))
    observed_items = tuple(part[0] for turn in then for part in turn if not isinstance(part, str))
    text = "".join(part for part in prompt if isinstance(part, str))
    return Sample(
        Prompt(index, text, asked, answer="2", media=shown),
        tuple(ids),
        tuple(mask),
        tuple(-0.5 if own else 0.0 for own in mask),
        Score(reward, correct=reward > 0.5),
        "y" if then else response,
        "stop",
        turns=1 + len(then),
        branches=tuple(branches),
        media=(*shown, *observed_items, *more),
    )
