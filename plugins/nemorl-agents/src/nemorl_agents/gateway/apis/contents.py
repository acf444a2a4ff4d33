"""Contents of messages: text, or parts of text, images and sounds, under the names that each API has for them.

An item is sent as base64, in a data URL or beside its type. Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nemorl.errors import DataError
from nemorl.media import Media, MediaKind
from nemorl_media.decoding import DATA_URL, media_of_base64, media_of_url

from nemorl_agents.gateway.body import kind, object_at, shown, text_at
from nemorl_agents.gateway.errors import RequestError, bad_field, unsupported

Part = Mapping[str, Any]
Content = str | list[Part]
"""Text alone, or parts as ``nemorl_rl.chat.media`` takes them: ``{"type": "image", "image": Media}``."""
TEXTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and the field that holds it."""
SOUNDS = ("wav", "mp3", "flac", "ogg")
AS_DATA = "send its data: data:image/png;base64,…"


def plain_text(content: Any, place: str) -> str:
    """The text of a content: a string, or parts of text, which a line break separates.

    Raises:
        RequestError: It is none, or holds other parts.
    """
    return content if isinstance(content, str) else _joined(_parts(content, place, items=False))


def content_of(content: Any, place: str) -> Content:
    """A content that may hold images and sounds: text as ``plain_text`` has it where it holds none.

    Raises:
        RequestError: It is none, or an item cannot be taken.
    """
    if isinstance(content, str):
        return content
    return joined(_parts(content, place, items=True))


def joined(parts: list[Part]) -> Content:
    """Parts as one content: text where they are nothing else."""
    return _joined(parts) if all(part["type"] == "text" for part in parts) else parts


def part_of(value: Any, place: str) -> Part | None:
    """A part of text, or one with an item; ``None`` where it is of a type that is neither.

    Raises:
        RequestError: It cannot be read.
    """
    part = object_at(value, place)
    name = part.get("type")
    if not isinstance(name, str):
        return None
    if name in TEXTS:
        return {"type": "text", "text": text_at(part.get(TEXTS[name]), f"{place}.{TEXTS[name]}")}
    if name not in ITEMS:
        return None
    item = ITEMS[name](part, place)
    return {"type": item.kind, item.kind: item}


def _parts(content: Any, place: str, *, items: bool) -> list[Part]:
    if not isinstance(content, list):
        raise bad_field(place, f"must be a string or a list of parts, not {kind(content)}")
    found = []
    for number, value in enumerate(content):
        part = part_of(value, f"{place}[{number}]")
        if part is None or (part["type"] != "text" and not items):
            served = "text, images and sounds" if items else "text"
            what = f"{shown(value.get('type'))} is not served here"
            raise unsupported(f"{place}[{number}].type", what, fix=f"send parts of {served}")
        found.append(part)
    return found


def _joined(parts: list[Part]) -> str:
    return "\n".join(part["text"] for part in parts)


# Items


def _in_object(field: str, kind: MediaKind) -> Callable[[Part, str], Media]:
    """Of chat completions: ``{"image_url": {"url": …}}``. Its ``detail`` changes nothing: sizes are the run's."""

    def read(part: Part, place: str) -> Media:
        return _of_url(object_at(part.get(field), f"{place}.{field}").get("url"), kind, f"{place}.{field}.url")

    return read


def _input_image(part: Part, place: str) -> Media:
    """Of responses: ``{"image_url": …}``."""
    if part.get("file_id") is not None:
        raise unsupported(f"{place}.file_id", "no files are kept here", fix=AS_DATA)
    return _of_url(part.get("image_url"), "image", f"{place}.image_url")


def _input_audio(part: Part, place: str) -> Media:
    """Of chat completions and responses: ``{"input_audio": {"data": …, "format": "wav"}}``."""
    place = f"{place}.input_audio"
    sound = object_at(part.get("input_audio"), place)
    form = text_at(sound.get("format"), f"{place}.format")
    if form not in SOUNDS:
        raise unsupported(f"{place}.format", f"{shown(form)} is not read", fix=f"use one of {', '.join(SOUNDS)}")
    return _of_base64(sound.get("data"), f"audio/{form}", f"{place}.data")


def _image_block(part: Part, place: str) -> Media:
    """Of Anthropic's messages: ``{"source": {"type": "base64", "media_type": "image/png", "data": …}}``."""
    place = f"{place}.source"
    source = object_at(part.get("source"), place)
    if source.get("type") == "url":
        return _of_url(source.get("url"), "image", f"{place}.url")
    if source.get("type") != "base64":
        what = f"{shown(source.get('type'))} is not served"
        raise unsupported(f"{place}.type", what, fix="send its data: use base64")
    media_type = text_at(source.get("media_type"), f"{place}.media_type")
    if not media_type.startswith("image/"):
        raise unsupported(f"{place}.media_type", f"{shown(media_type)} is no image's", fix="use image/png or another")
    return _of_base64(source.get("data"), media_type, f"{place}.data")


ITEMS: Mapping[str, Callable[[Part, str], Media]] = {
    "image_url": _in_object("image_url", "image"),
    "audio_url": _in_object("audio_url", "audio"),
    "input_image": _input_image,
    "input_audio": _input_audio,
    "image": _image_block,
}
"""Readers of parts that hold an item, by their types in the APIs."""


def _of_url(value: Any, kind: MediaKind, place: str) -> Media:
    url = text_at(value, place)
    if DATA_URL.match(url) is None:
        raise unsupported(place, f"{url[:60]!r} is no data URL, and nothing is fetched from elsewhere", fix=AS_DATA)
    try:
        item = media_of_url(url)
    except DataError as error:
        raise _unreadable(error, place) from None
    if item.kind != kind:
        raise bad_field(place, f"holds {item.kind}, and its part {kind}", fix="send it in a part of its own kind")
    return item


def _of_base64(value: Any, media_type: str, place: str) -> Media:
    try:
        return media_of_base64(text_at(value, place), media_type)
    except DataError as error:
        raise _unreadable(error, place) from None


def _unreadable(error: DataError, place: str) -> RequestError:
    return bad_field(place, error.message, fix=error.fix)
