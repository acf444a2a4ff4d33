"""Results of tools as contents of messages: text, or parts where there are images and sounds among them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nemorl.media import Media, MediaKind
from nemorl_media.decoding import media_of_image
from nemorl_rl.chat.media import PARTS
from pydantic_core import to_jsonable_python

Result = str | list[dict[str, Any]]
"""Text, or parts: ``{"type": "text", "text": …}`` and those of ``nemorl_rl.chat.media``."""


def as_result(value: object) -> Result:
    """Text as it is; images (of Pillow, or ``Media``), sounds, and lists that hold some as parts; all else as JSON.

    Example:
        >>> as_result({"a": 1}), as_result(["seen:", Media("image", b"...")])[0]
        ('{"a": 1}', {'type': 'text', 'text': 'seen:'})
    """
    if isinstance(value, str):
        return value
    if _is_item(value):
        return [_part(value)]
    if isinstance(value, list | tuple) and any(map(_is_item, value)):
        return [_part(one) for one in value]
    return as_json(value)


def as_json(value: object) -> str:
    return json.dumps(to_jsonable_python(value, fallback=str))


def seen(result: Result, kinds: Collection[MediaKind], max_chars: int) -> Result:
    """What the model is shown of a result: its text up to a length, and of its items those of the kinds that it takes,
    each whole. Others are named in the text.

    Example:
        >>> seen([{"type": "image", "image": Media("image", b"...")}], kinds=(), max_chars=10)
        '[image]'
    """
    if isinstance(result, str):
        return cut(result, max_chars)
    found: list[dict[str, Any]] = []
    left = max_chars
    for part in result:
        if part["type"] == "text":
            found.append({"type": "text", "text": cut(part["text"], left)})
            left = max(0, left - len(part["text"]))
        elif PARTS[part["type"]] in kinds:
            found.append(part)
        else:
            found.append({"type": "text", "text": f"[{PARTS[part['type']]}]"})
    if all(part["type"] == "text" for part in found):
        return "\n".join(part["text"] for part in found)
    return found


def cut(text: str, max_chars: int) -> str:
    left_out = len(text) - max_chars
    return text if left_out <= 0 else f"{text[:max_chars]}… ({left_out} more characters)"


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """The text among parts, a line each."""
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _is_item(value: object) -> bool:
    from PIL.Image import Image

    if isinstance(value, Mapping):
        return isinstance(value.get("type"), str) and value["type"] in PARTS
    return isinstance(value, Media | Image)


def _part(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and (_is_item(value) or value.get("type") == "text"):
        return dict(value)
    if _is_item(value):
        item = value if isinstance(value, Media) else media_of_image(value)
        return {"type": item.kind, item.kind: item}
    return {"type": "text", "text": value if isinstance(value, str) else as_json(value)}
