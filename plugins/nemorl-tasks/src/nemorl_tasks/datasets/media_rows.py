"""Images, sounds and videos of a row as parts of a chat message.

A part is ``{"type": "image", "image": item}`` beside ``{"type": "text", "text": …}``; an item is what the row holds
(bytes, ``{"bytes": …, "path": …}`` as the hub's tables have it, an image object, a data URL), with the bytes of a file
where it holds a name. Nothing is decoded here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemorl.base.text.reading import expanded
from nemorl.errors import DataError

from nemorl_tasks.datasets.mapping import look_up
from nemorl_tasks.datasets.preset_file import MediaColumn


@dataclass(frozen=True, slots=True)
class Media:
    """One image, sound or video of a row."""

    kind: str
    data: Any
    """As the row holds it, files read"""
    marker: str | None
    """Regular expression of what it takes the place of"""
    stands_before: bool = True
    """It goes before the text; else in place of a marker in it"""

    @property
    def part(self) -> dict[str, Any]:
        """The part of a message's content."""
        return {"type": self.kind, self.kind: self.data}


def media_of(row: Mapping[str, Any], columns: Sequence[MediaColumn], folder: str | None, place: str) -> list[Media]:
    """The row's images, sounds and videos, column by column.

    Args:
        row: As it is published.
        columns: Where they are.
        folder: Of files that the row names.
        place: What errors call the row.

    Raises:
        DataError: there is none where one should be, or its file is not there or not in the folder.
    """
    found = []
    for column in columns:
        value = look_up(row, column.column, place)
        items = value if isinstance(value, list) else [value]
        if not items:
            raise DataError(
                f"{place}: no {column.kind} in column {column.column!r}", fix="complete the row, or drop it"
            )
        marker = None if column.marker is None else _pattern(column.marker)
        found += [Media(column.kind, _item(item, column, folder, place), marker) for item in items]
    return found


def _item(item: Any, column: MediaColumn, folder: str | None, place: str) -> Any:
    if isinstance(item, Mapping):
        if item.get("bytes"):
            return dict(item)
        item = item.get("path")
    if item is None:
        raise DataError(f"{place}: no {column.kind} in column {column.column!r}", fix="complete the row, or drop it")
    if isinstance(item, str) and not item.startswith("data:"):
        return {"bytes": _file(item, folder, place), "path": item}
    return item


def _file(name: str, folder: str | None, place: str) -> bytes:
    """The bytes of a file that a row names. A name leads to no other place than the folder, and to no other machine."""
    if "://" in name:
        raise DataError(f"{place}: {name} is on another machine", fix="download it, and name the file")
    if folder is None:
        raise DataError(f"{place}: it names the file {name}", fix="say where it is: media_folder: …")
    root = Path(os.path.abspath(expanded(folder)))
    path = Path(os.path.abspath(root / name))
    if not path.is_relative_to(root):
        raise DataError(
            f"{place}: {name} is not in {folder}", fix="correct the row: names are relative to media_folder"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{place}: the file {name} cannot be read from {folder} ({error.strerror})", fix="check media_folder"
        ) from error


def _pattern(marker: str) -> str:
    """``<image>`` means ``<image_1>`` too."""
    return rf"{re.escape(marker[:-1])}(?:_\d+)?>" if marker.endswith(">") else re.escape(marker)


def placed(media: Sequence[Media], text: str, place: str) -> tuple[list[Media], str]:
    """Where each item goes, and the prompt without the markers that it begins with.

    Those of the beginning stay there whatever a template puts around the text. Items whose marker is not in the text go
    before it.

    Raises:
        DataError: a kind has another number of items than of markers, so that nobody can say which is meant.
    """
    for marker in filter(None, {item.marker for item in media}):
        items, markers = sum(item.marker == marker for item in media), len(re.findall(marker, text))
        if markers not in (0, items):
            kind = next(item.kind for item in media if item.marker == marker)
            raise DataError(
                f"{place}: {items} {kind}(s) for {markers} marker(s) in {text!r:.80}", fix="correct the row"
            )
    shown = {item.marker for item in media if item.marker and re.search(item.marker, text)}
    first = [item for item in media if item.marker not in shown]
    waiting = [item for item in media if item.marker in shown]
    while waiting and (head := re.match(rf"\s*({'|'.join(sorted(shown))})\s*", text)):
        item = next(item for item in waiting if re.fullmatch(item.marker or "", head[1]))
        waiting.remove(item)
        first.append(item)
        text = text[head.end() :]
    return [*first, *(replace(item, stands_before=False) for item in waiting)], text


def with_parts(message: Mapping[str, Any], media: Sequence[Media]) -> dict[str, Any]:
    """A message of text with its media: those before the text, and each other one in place of its marker and of the
    space around that.

    Example:
        >>> bell = Media("audio", b"...", None)
        >>> with_parts({"role": "user", "content": "What rings?"}, [bell])["content"]
        [{'type': 'audio', 'audio': b'...'}, {'type': 'text', 'text': 'What rings?'}]
    """
    parts = [item.part for item in media if item.stands_before]
    waiting = [item for item in media if not item.stands_before]
    text = str(message["content"])
    while waiting:
        found = re.search("|".join(sorted({item.marker or "" for item in waiting})), text)
        assert found is not None, "placed() counted the markers"
        item = next(item for item in waiting if re.fullmatch(item.marker or "", found[0]))
        waiting.remove(item)
        parts += [*_text(text[: found.start()].rstrip()), item.part]
        text = text[found.end() :].lstrip()
    return {**message, "content": [*parts, *_text(text)]}


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text.strip() else []
