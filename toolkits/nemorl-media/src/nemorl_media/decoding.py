"""Files of images as pixels, within limits: whoever sends them is not trusted."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nemorl.errors import DataError
from nemorl.media import Media, MediaKind

from nemorl_media.kept_items import one_copy

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 * 2**20
"""Of one file."""
MAX_PIXELS = 64 * 10**6
"""Of one image, decoded: 192 MB."""
MAX_RATIO = 200
"""Longer side of an image by the shorter. Qwen-VL's processors take no longer ones, and others, which scale the shorter
side to a size, would make them huge."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,", re.ASCII)
KINDS: Mapping[str, MediaKind] = {"image": "image", "audio": "audio"}
STARTS: Mapping[MediaKind, Mapping[str, bytes]] = {
    "image": {
        "png": b"\x89PNG",
        "jpeg": b"\xff\xd8\xff",
        "gif": b"GIF8",
        "webp": b"RIFF....WEBP",
        "bmp": b"BM",
        "tiff": rb"II\*\0|MM\0\*",
    },
    "audio": {"wav": b"RIFF....WAVE", "flac": b"fLaC", "ogg": b"OggS"},
}
"""First bytes of files, as regular expressions, by their media type"""
UNKNOWN: Mapping[MediaKind, str] = {"image": "png", "audio": "mpeg"}
"""Types of files that begin otherwise: whoever reads them looks for himself"""
SENT_AS = "send a data URL (data:image/png;base64,…), or the file's bytes"


def media_of_url(url: str) -> Media:
    """The item in a data URL.

    Raises:
        DataError: It is another kind of URL, no base64, too large, or neither an image nor a sound.

    Example:
        >>> media_of_url("data:image/png;base64,aGk=").kind
        'image'
    """
    found = DATA_URL.match(url)
    if found is None:
        raise DataError(f"{url[:60]!r} is no data URL, and nothing is fetched from elsewhere", fix=SENT_AS)
    return media_of_base64(url[found.end() :], found["type"])


def media_of_base64(encoded: str, media_type: str) -> Media:
    """The item that APIs send as text.

    Args:
        encoded: Base64 of a file.
        media_type: E.g. ``image/png``.

    Raises:
        DataError: It is no base64, too large, or neither an image nor a sound.
    """
    kind = KINDS.get(media_type.partition("/")[0].lower())
    if kind is None:
        raise DataError(f"a file of type {media_type[:60]!r}", fix="send an image or a sound")
    require_size(len(encoded) * 3 // 4)
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"the data of {kind} is no base64: {error}", fix=SENT_AS) from error
    return one_copy(Media(kind, data))


def data_url(item: Media) -> str:
    """The item as text, for JSON. Its type is told by the first bytes of the file, where these are known.

    Example:
        >>> data_url(Media("image", b"GIF89a"))
        'data:image/gif;base64,R0lGODlh'
    """
    formats = (name for name, start in STARTS[item.kind].items() if re.match(start, item.data, re.DOTALL))
    found = next(formats, UNKNOWN[item.kind])
    return f"data:{item.kind}/{found};base64,{base64.b64encode(item.data).decode()}"


def media_of_image(image: Any) -> Media:
    """The item of an image as datasets have them.

    Args:
        image: Of Pillow, the bytes of a file, a data URL, or ``{"bytes": …}`` as the hub's datasets store it.

    Raises:
        DataError: It is none of these, or too large.
    """
    from PIL import Image

    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
        image = image["bytes"]
    if isinstance(image, str):
        return media_of_url(image)
    if isinstance(image, bytes | bytearray | memoryview):
        require_size(len(image))
        return Media("image", bytes(image))
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        with _decoding(f"an image of {image.width} x {image.height} pixels"):
            _as_shown(image).save(file, "PNG")
        return Media("image", file.getvalue())
    raise DataError(f"an image is a {type(image).__name__}", fix=SENT_AS)


def pixels(item: Media) -> Image:
    """The image in RGB as a viewer shows it: upright, on white where it is transparent, an animation at its start.

    Raises:
        DataError: It is damaged, of a format that is not taken, or has too many pixels.

    Example:
        >>> from PIL import Image
        >>> pixels(media_of_image(Image.new("L", (3, 2)))).size
        (3, 2)
    """
    from PIL import Image

    with _decoding(str(item)), Image.open(io.BytesIO(item.data), formats=FORMATS) as image:
        return _as_shown(image)


def require_size(size: int) -> None:
    """Refuse a file of more than ``MAX_BYTES``."""
    if size > MAX_BYTES:
        raise DataError(f"a file of {size / 2**20:.0f} MiB, more than {MAX_BYTES >> 20}", fix="scale it down")


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    """Whatever a decoder raises of a file is an error of the data: damaged ones meet every corner of its code."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"{what} is no image that can be read", fix=f"use one of {', '.join(FORMATS)}") from error
    except Exception as error:
        raise DataError(f"{what} cannot be decoded: {error}", fix="leave it out, or save it anew") from error


def _as_shown(image: Image) -> Image:
    """[width, height] in RGB."""
    from PIL import Image, ImageOps

    long, short = max(image.size), min(image.size)
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"an image has {image.width} x {image.height} pixels, more than {MAX_PIXELS / 1e6:.0f} million",
            fix="scale it down",
        )
    if not short or long / short > MAX_RATIO:
        raise DataError(
            f"an image of {image.width} x {image.height} pixels is empty or longer than {MAX_RATIO} times its width",
            fix="cut it into several images",
        )
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256, "L")  # plain conversion takes all above 255 for white
    elif image.mode in ("I", "F"):
        raise DataError("an image has numbers whose white is not known", fix="save it with 8 or 16 bits per channel")
    upright = ImageOps.exif_transpose(image)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    layer = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
