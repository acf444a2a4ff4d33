"""Messages between a driver and the process of an isolated plugin: JSON of a known shape, of a bounded length.

A message is a head (length of the body, number of the call, kind) and a body of UTF-8 JSON. What comes from a plugin is
data whatever it holds: no object is made of it but numbers, texts, lists, mappings and, by :data:`REPLIES`, nemorl's
own types. A process that breaks these rules is ended.
"""

from __future__ import annotations

import dataclasses
import json
import select
import socket
import struct
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from nemorl.types import Step
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

MAX_MESSAGE_BYTES = 16 << 20
"""Of a body, in either direction. The longest prompts and rows in use have 1 MB; datasets travel in pages."""
PAGE_BYTES = 1 << 20
"""Of a dataset's rows in one message, unless one row alone is longer."""
MAX_ERROR_CHARACTERS = 4000
MAX_NAME_CHARACTERS = 200
"""Of what a plugin gave that an error names."""
CALL, RESULT, ERROR = range(3)
"""Kinds of message."""
_HEAD = struct.Struct(">IQB")

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=100)]


class WireError(Exception):
    """A message that cannot be sent, or that is not what was agreed."""


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Option(_Reply):
    """One option of a config class, as ``describe_options`` gives it."""

    name: Name
    type: str
    required: bool
    default: JsonValue
    description: str
    resumable: bool


class ClassData(_Reply):
    """Class data of a config class."""

    summary: str = ""
    install_hint: str = ""
    requires_modules: tuple[str, ...] = ()
    supports: frozenset[str] = frozenset()
    weight_transports: tuple[str, ...] = ()


class Description(_Reply):
    """Description of a config class for its stand-in."""

    doc: str
    missing_modules: list[str]
    class_data: ClassData
    schema_: dict[str, JsonValue] = Field(alias="schema")
    options: list[Option]
    not_asked: list[str]
    """Methods that the class overrides, and that a driver would have to ask and cannot."""


REPLIES: Mapping[str, Any] = {
    "": str,
    "describe": Description,
    "check": list[tuple[str, str, str | None]],
    "devices_per_replica": Annotated[int, Field(ge=1)],
    "dataset": tuple[int, Annotated[int, Field(ge=0)]] | None,
    "rows": list[dict[str, JsonValue]],
    "environment": tuple[int, str, bool],
    "logger": int,
    "start": int,
    "step": Step,
    "log": None,
    "close": None,
    "forget": None,
}
"""Type of each verb's answer; the first is the greeting, a version."""


@cache
def _schema(verb: str) -> TypeAdapter[Any]:
    return TypeAdapter(REPLIES[verb])


def result_of(verb: str, body: bytes) -> Any:
    """Contents of a reply.

    Raises:
        WireError: it is not what the verb answers with.
    """
    try:
        return _schema(verb).validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        said = f"{where:.{MAX_NAME_CHARACTERS}}: {first['msg']:.{MAX_NAME_CHARACTERS}}"
        raise WireError(f"answered {verb or 'its start'} with something else: {said}") from None


def error_of(body: bytes) -> str:
    """The text of a reply that says what went wrong over there."""
    return body.decode(errors="replace")[:MAX_ERROR_CHARACTERS]


def packed(data: Any) -> bytes:
    """Plain data as the body of a message.

    Raises:
        WireError: it is not plain, or too long.
    """
    try:
        body = json.dumps(data, default=_plain, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"takes plain data only: {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"exchanges at most {MAX_MESSAGE_BYTES >> 20} MiB at once, and this has {len(body) >> 20}")
    return body


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return dict(value)
        case Set():
            return sorted(value)
        case Path():
            return str(value)
        case Enum():
            return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is no text, number, list or mapping")


def send(connection: socket.socket, number: int, kind: int, body: bytes, *, until: float | None = None) -> None:
    """Send one message whole. The caller sees to it that no other is sent meanwhile.

    Args:
        until: When the other side must have taken all of it, by the monotonic clock.

    Raises:
        TimeoutError: it has not.
    """
    left = memoryview(_HEAD.pack(len(body), number, kind) + body)
    while left:
        _wait(connection, select.POLLOUT, until)
        with suppress(BlockingIOError):
            left = left[connection.send(left, socket.MSG_DONTWAIT) :]


def receive(connection: socket.socket, *, until: float | None = None) -> tuple[int, int, bytes]:
    """The next message: number, kind, body.

    Args:
        until: When it must be there, whole, by the monotonic clock.

    Raises:
        EOFError: the other side is gone, perhaps in the middle of a message.
        TimeoutError: the message is not there in time.
        WireError: the message is longer than any may be, or of no known kind.
    """
    length, number, kind = _HEAD.unpack(_exactly(connection, _HEAD.size, until))
    if length > MAX_MESSAGE_BYTES or kind not in (CALL, RESULT, ERROR):
        raise WireError(f"sent what is no message, or one of {length:,} bytes where {MAX_MESSAGE_BYTES:,} are the most")
    return number, kind, _exactly(connection, length, until)


def _exactly(connection: socket.socket, count: int, until: float | None) -> bytes:
    received = bytearray()
    while len(received) < count:
        _wait(connection, select.POLLIN, until)
        part = connection.recv(min(count - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def _wait(connection: socket.socket, event: int, until: float | None) -> None:
    """Until something can be sent or received. A deadline of the whole: each byte may come just in time."""
    poll = select.poll()
    poll.register(connection, event)
    left_ms = None if until is None else max(0.0, (until - time.monotonic()) * 1000)
    if not poll.poll(left_ms):
        raise TimeoutError("the other side takes too long")
