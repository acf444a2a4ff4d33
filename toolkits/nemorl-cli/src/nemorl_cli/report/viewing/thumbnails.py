"""Images of records made small for a page, each at most once; sounds stay as they are."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replacing
from nemorl.errors import NemorlError, UsageError
from nemorl.media import Media

from nemorl_cli.report.records.media_files import TYPES, media_file

LONGEST = 256
"""Pixels of the longer side."""
JPEG_QUALITY = 85
MOST_BYTES = 4 * 2**20
"""Of images and sounds inside one page."""
LONGEST_SOUND = 512 * 2**10
"""Bytes of a sound that is put into a page."""


def thumbnail(data: bytes) -> bytes:
    """An image of at most ``LONGEST`` pixels a side, as PNG or JPEG, whichever is smaller.

    Raises:
        DataError: It is damaged, or has too many pixels.
    """
    from nemorl_media.decoding import pixels

    image = pixels(Media("image", data))
    image.thumbnail((LONGEST, LONGEST))
    files = []
    for form, options in (("PNG", {"optimize": True}), ("JPEG", {"quality": JPEG_QUALITY})):
        file = io.BytesIO()
        image.save(file, form, **options)  # type: ignore[arg-type]
        files.append(file.getvalue())
    return min(files, key=len)


class Thumbnails:
    """Those of one run, in a folder outside of it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        """
        Args:
            folder: Of the run's records.
            cache: Where they are kept.
        """
        self._folder, self._cache = folder, cache

    def get(self, digest: str) -> Path:
        """The file of an image's thumbnail.

        Raises:
            UsageError: There is no such image, or it cannot be decoded.
        """
        path = self._cache / f"{digest}.small"
        source = media_file(self._folder, digest)
        if source is None:
            raise UsageError("the records show no such image", fix="load the page again")
        if not path.is_file():
            try:
                data = thumbnail(source.read_bytes())
            except NemorlError as error:
                raise UsageError(f"the image cannot be shown: {error}", fix="open its file") from error
            self._cache.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(data)
        return path


def inlined_media(folder: Path, digests: Iterable[str], beside: Path | None) -> dict[str, dict[str, Any]]:
    """Images and sounds for a page without a server: digest -> ``{"small": data URL or None, "full": link or None}``.

    Args:
        folder: Of the records.
        digests: Those that the page shows, the most important first. What is beyond ``MOST_BYTES`` is linked alone.
        beside: The folder of the page. Unset: nothing is linked.
    """
    found: dict[str, dict[str, Any]] = {}
    left = MOST_BYTES
    for digest in dict.fromkeys(digests):
        path = media_file(folder, digest)
        if path is None:
            continue
        small = _small(path) if left > 0 else None
        left -= len(small or "")
        found[digest] = {"small": small, "full": _link(path, beside)}
    return found


def data_url(data: bytes, media_type: str) -> str:
    """
    Example:
        >>> data_url(b"hi", "image/png")
        'data:image/png;base64,aGk='
    """
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def type_of(data: bytes) -> str:
    """Media type of a thumbnail."""
    return "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"


def _small(path: Path) -> str | None:
    media_type = TYPES.get(path.suffix[1:])
    try:
        data = path.read_bytes()
        if media_type is not None and media_type.startswith("audio/"):
            return data_url(data, media_type) if len(data) <= LONGEST_SOUND else None
        data = thumbnail(data)
    except (NemorlError, OSError):  # the page shows its name alone
        return None
    return data_url(data, type_of(data))


def _link(path: Path, beside: Path | None) -> str | None:
    try:
        return None if beside is None else path.resolve().relative_to(beside.resolve()).as_posix()
    except ValueError:  # it is elsewhere
        return None


def digests_of(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Of the items of records, or of whatever has ``media``, in order."""
    return list(dict.fromkeys(item["digest"] for record in records for item in record.get("media") or ()))
