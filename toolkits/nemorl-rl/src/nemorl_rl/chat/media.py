"""Images and sounds in rows and messages: brought to one form, and to the ids that stand for them.

In one form an item is the part ``{"type": kind, "media": Media}``, for which chat templates write their own
placeholder; what the model's family writes in its place follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemorl.errors import DataError
from nemorl.media import Media, MediaKind

from nemorl_rl.agents.contract import ContextOverflowError

if TYPE_CHECKING:
    from nemorl.types import Row
    from nemorl_media.expansion import Written
    from nemorl_media.family import Family

    from nemorl_rl.data.tokenizer import Tokenizer

PARTS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Types of content parts that hold an item, of datasets and of the APIs that clients speak; the part's own field has
the same name, or that of the kind."""
COLUMNS: Mapping[str, MediaKind] = {"image": "image", "images": "image", "audio": "audio", "audios": "audio"}
"""Columns of rows that hold one item or several."""
UNKNOWN_COLUMNS = ("video", "videos")
TEXT_ALONE = "use a model that sees or hears (docs/media.md), leave such rows out, or drop the column"


@dataclass(frozen=True, slots=True)
class ShownTokens:
    """Token ids, and the items in them."""

    ids: tuple[int, ...]
    media: tuple[Media, ...] = ()


def with_media(row: Row, family: Family | None) -> Row:
    """The row with its items in one form, in the contents of its messages; as it is where it has none.

    Items in columns of their own go where the messages have parts without any, in order; where there is no such part,
    before the text of the first message of the user.

    Raises:
        DataError: An item is none or cannot be sent, or the model knows none of its kind.
    """
    columns = [name for name in COLUMNS if not _is_empty(row.get(name))]
    for name in UNKNOWN_COLUMNS:
        if not _is_empty(row.get(name)):
            raise DataError(f"a row has a `{name}` column that is not empty", fix="give a film's frames as images")
    turns = row.get("prompt") or row.get("messages")
    shown = [kind for name in ("prompt", "messages", "chosen", "rejected") for kind in _types(row.get(name))]
    if not columns and not shown:
        return row
    if family is None:
        what = f"a `{columns[0]}` column that is not empty" if columns else f"content of type {shown[0]!r}"
        raise DataError(f"a row has {what}, and the model reads text alone", fix=TEXT_ALONE)
    waiting: dict[str, list[Media]] = {"image": [], "audio": []}
    for name in columns:
        given = row[name] if isinstance(row[name], list | tuple) else [row[name]]
        waiting[COLUMNS[name]] += [_settled(item, COLUMNS[name], family) for item in given]
    kept = {name: value for name, value in row.items() if name not in COLUMNS}
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    name = "prompt" if row.get("prompt") else "messages"
    kept[name] = _filled(_in_one_form(turns or (), family), waiting)
    for reply in ("chosen", "rejected"):
        if _types(row.get(reply)):
            kept[reply] = _in_one_form(row[reply], family)
    return kept


def media_in(messages: Iterable[Any]) -> tuple[Media, ...]:
    """Items of messages in one form, in their order.

    Example:
        >>> media_in([{"role": "user", "content": [{"type": "image", "media": Media("image", b"...")}]}])
        (Media(image, 3 bytes, ...),)
    """
    return tuple(part["media"] for part in _parts(messages) if isinstance(part.get("media"), Media))


def holds_items(messages: Iterable[Any]) -> bool:
    """Some message has a part that says it is an image or a sound."""
    return any(part.get("type") in PARTS for part in _parts(messages))


def process_items(
    plain: Iterable[Any], family: Family | None, limit: int, require_wanted: Callable[[], object] = lambda: None
) -> None:
    """Have the items of a prompt processed, one after the other, so that whoever writes it finds them.

    A file of 7 KB may hold an image that takes ten seconds, and a body thousands of them: those of a prompt that is too
    long, or that nobody waits for any more, are left alone.

    Args:
        plain: Messages in one form.
        family: Of the model.
        limit: Tokens that the prompt may have.
        require_wanted: Raises where nobody waits for the prompt; asked before each item.

    Raises:
        ContextOverflowError: The items alone have more tokens.
        DataError: One of them cannot be read.
    """
    if family is None:
        return
    tokens = 0
    for item in media_in(plain):
        require_wanted()
        tokens += family.outline(item).tokens
        if tokens > limit:
            raise ContextOverflowError(tokens, limit)


def part_of(part: Mapping[str, Any], family: Family | None, number: int) -> dict[str, Any]:
    """A part of message ``number`` that holds an item, in one form.

    Raises:
        DataError: It holds none, it cannot be read, or the model reads text alone.
    """
    kind = PARTS[part["type"]]
    if family is None:
        raise DataError(
            f"message {number} holds content of type {part['type']!r}, and the model reads text alone",
            fix="use a model that sees or hears (docs/media.md), or send text",
        )
    if isinstance(part.get("media"), Media):
        return dict(part)
    fields = (part["type"], kind, f"{kind}_url", "url", "data")
    given = next((part[name] for name in fields if not _is_empty(part.get(name))), None)
    if given is None:
        return {"type": kind}  # a place, for what a column of the row has
    return {"type": kind, "media": _settled(given, kind, family)}


def written(text: str, messages: Iterable[Any], tokenizer: Tokenizer) -> Written | None:
    """A chat template's text of messages in one form, with their items; ``None`` where they have none.

    Raises:
        DataError: The template has not written a placeholder for each, or an item cannot be read.
    """
    media, family = media_in(messages), tokenizer.family
    if family is None or not media:
        return None
    from nemorl_media import expansion

    return expansion.written(text, media, family, tokenizer.token)


def with_items(text: str, messages: Iterable[Any], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a chat template's text of these messages; raises as ``written`` does."""
    shown = written(text, messages, tokenizer)
    return tokenizer.encode_observation(text) if shown is None else shown.ids(tokenizer.encode_observation)


def shown_parts(parts: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> ShownTokens:
    """An observation in parts as tokens: text as it is, items as the chat template writes them.

    Raises:
        DataError: The model reads text alone, or its template does not show such items.
    """
    [message] = _in_one_form([{"content": list(parts)}], tokenizer.family)
    ids: list[int] = []
    for part in message["content"]:
        text = part["text"] if part["type"] == "text" else tokenizer.chat.written(part["type"])
        ids += with_items(text, [{"content": [part]}], tokenizer)
    return ShownTokens(tuple(ids), media_in([message]))


def _settled(given: Any, kind: MediaKind, family: Family) -> Media:
    from nemorl_media.audio import media_of_sound
    from nemorl_media.decoding import media_of_image

    if isinstance(given, Mapping) and isinstance(given.get("url"), str):  # {"image_url": {"url": …}}
        given = given["url"]
    if not isinstance(given, Media):
        given = media_of_image(given) if kind == "image" else media_of_sound(given)
    if given.kind != kind:
        raise DataError(f"{given} stands where an {kind} is said to be", fix="name its kind in the type of the part")
    return family.named(given)


def _in_one_form(messages: Any, family: Family | None) -> list[Any]:
    return [
        {**message, "content": [_one_form(part, family, number) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        else message
        for number, message in enumerate(messages)
    ]


def _one_form(part: Any, family: Family | None, number: int) -> Any:
    return part_of(part, family, number) if isinstance(part, Mapping) and part.get("type") in PARTS else part


def _filled(messages: Sequence[Any], waiting: Mapping[str, list[Media]]) -> list[Any]:
    """Items of columns in their places."""
    places = [part for part in _parts(messages) if part.get("type") in waiting and "media" not in part]
    if not places:
        return _before_the_text(messages, [item for items in waiting.values() for item in items])
    for part in places:
        if not waiting[part["type"]]:
            raise DataError(
                f"messages have more places for {part['type']}s than the row has",
                fix="give one item for each part, in its own field or in a column",
            )
        part["media"] = waiting[part["type"]].pop(0)
    if any(waiting.values()):
        raise DataError("a row has more images or sounds than its messages have places", fix="give one part for each")
    return list(messages)


def _before_the_text(messages: Sequence[Any], items: Sequence[Media]) -> list[Any]:
    found = list(messages)
    if not items:
        return found
    for number, message in enumerate(found):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content") or ()
            said = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            found[number] = {**message, "content": [*({"type": one.kind, "media": one} for one in items), *said]}
            return found
    raise DataError(
        "a row has images or sounds in a column, and no message of a user that they could stand in",
        fix='give them as parts of the messages, {"type": "image", "image": …}, or add a message of the role user',
    )


def _parts(messages: Any) -> Iterator[dict[str, Any]]:
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            yield from (part for part in content if isinstance(part, Mapping))  # type: ignore[misc]


def _types(messages: Any) -> list[str]:
    """Of the parts that hold an item."""
    return [str(part["type"]) for part in _parts(messages) if part.get("type") in PARTS]


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)
