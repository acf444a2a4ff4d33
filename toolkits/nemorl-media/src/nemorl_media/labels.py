"""Images and sounds in a few words, for people: ``[image 90x60 1f3a…]``."""

from __future__ import annotations

import io
import wave
from typing import BinaryIO

from nemorl.media import Media

from nemorl_media.decoding import FORMATS

DIGITS = 4
"""Of a digest."""


def label(kind: str, size: str, digest: str) -> str:
    """
    Example:
        >>> label("image", "90x60", "1f3ab2c4"), label("audio", "", "0a9b8c7d")
        ('[image 90x60 1f3a…]', '[audio 0a9b…]')
    """
    return f"[{' '.join(part for part in (kind, size, digest[:DIGITS]) if part)}…]"


def label_of(item: Media) -> str:
    """The label of an item."""
    return label(item.kind, size_of(io.BytesIO(item.data)), item.digest)


def size_of(file: BinaryIO) -> str:
    """Width and height of an image in pixels, or seconds of a sound; empty where that is not said at its beginning.

    Args:
        file: Of which no more than the beginning is read.
    """
    from PIL import Image

    is_wave = file.read(4) == b"RIFF" and file.seek(8) == 8 and file.read(4) == b"WAVE"
    file.seek(0)
    try:
        if is_wave:
            with wave.open(file) as sound:
                return f"{sound.getnframes() / sound.getframerate():.1f} s"
        with Image.open(file, formats=FORMATS) as image:
            return f"{image.width}x{image.height}"
    except Exception:  # a sound of another format, or damaged: decoders raise all sorts of errors
        return ""
