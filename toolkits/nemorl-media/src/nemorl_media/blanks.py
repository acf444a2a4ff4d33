"""Items that show nothing: for checks, and for passes that a rank makes because others see something."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable

from nemorl.media import Media, MediaKind

SIDE = 56
RATE = 16_000


def blank_image(shade: int = 128, side: int = SIDE) -> Media:
    """A square of one grey."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (side, side), (shade, shade, shade)).save(file, "PNG")
    return Media("image", file.getvalue())


def blank_sound(seconds: float = 0.5) -> Media:
    """Silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes(bytes(2 * int(RATE * seconds)))
    return Media("audio", file.getvalue())


BLANKS: dict[MediaKind, Callable[[], Media]] = {"image": blank_image, "audio": blank_sound}


def negative(item: Media) -> Media:
    """An item of the same size that shows something else: an image in opposite colours, a sound backwards.

    Raises:
        DataError: It cannot be decoded.
    """
    if item.kind == "image":
        from PIL import ImageOps

        from nemorl_media.decoding import media_of_image, pixels

        return media_of_image(ImageOps.invert(pixels(item)))
    from nemorl_media.audio import backwards

    return backwards(item)
