"""The language of judge and program: length-prefixed JSON that stands for plain data, and for nothing else.

The judge imports this module; the program's side gets it as text in front of ``driver.py``. A message is four bytes of
length, most significant first, then that much ASCII. ``None``, booleans, integers, floats and strings are as JSON has
them; everything else is ``[kind, content]``. What a program says comes out as objects of exactly these types.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

MAX_BYTES = 2 << 20
"""Of one message."""
MAX_ITEMS = 100_000
"""Of an iterator, which travels as all that it yields."""
JSON_INTEGERS = 1 << 53
"""Larger ones travel as hexadecimal digits, which have no limit of length and take linear time."""
TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
"""Those that may be arguments."""
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class ProtocolError(Exception):
    """A message is not of this language."""


class NotPlainError(TypeError):
    """A value is no plain data."""


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """As JSON; ``other`` gets what is not plain data and returns its JSON, or raises ``NotPlainError``."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -JSON_INTEGERS < value < JSON_INTEGERS else ["int", hex(value)]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode(item, other) for item in value]]
    if kind is dict:
        return ["dict", [[encode(key, other), encode(item, other)] for key, item in value.items()]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind is range:
        return ["range", [encode(part, other) for part in (value.start, value.stop, value.step)]]
    return other(value)


def encode_argument(value: Any, other: Callable[[Any], Any]) -> Any:
    """Encode what a program may get besides plain data: built-in types, and what an iterator yields."""
    if type(value) is type(iter([])):
        return encode(list(value), other)
    if isinstance(value, type) and value in TYPES:
        return ["type", value.__name__]
    raise NotPlainError(f"an argument is an object of type {type(value).__name__}, which is no plain data")


def decode(said: Any, other: Callable[[str, Any], Any]) -> Any:
    """Out of JSON; ``other`` gets the kinds that are not plain data.

    Raises:
        ProtocolError: it stands for nothing.
    """
    if said is None or type(said) in (bool, int, float, str):
        return said
    if type(said) is not list or len(said) != 2 or type(said[0]) is not str:
        raise ProtocolError("no value")
    kind, content = said
    try:
        if kind in SEQUENCES:
            return SEQUENCES[kind]([decode(item, other) for item in _list(content)])
        if kind == "dict":
            return {decode(key, other): decode(item, other) for key, item in map(_list, _list(content))}
        if kind == "int":
            return int(content, 16)
        if kind in ("bytes", "bytearray"):
            return bytes.fromhex(content) if kind == "bytes" else bytearray.fromhex(content)
        if kind == "complex":
            real, imaginary = _list(content)
            return complex(float(real), float(imaginary))
        if kind == "range":
            return range(*(decode(part, other) for part in _list(content)))
        if kind == "iterator":
            return iter([decode(item, other) for item in _list(content)])
    except (TypeError, ValueError) as error:  # unhashable keys, digits that are none
        raise ProtocolError(f"no {kind}: {error}") from None
    return other(kind, content)


def _list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise ProtocolError("no list")
    return content


def pack(message: dict[str, Any]) -> bytes:
    """
    Raises:
        NotPlainError: it is too long.
    """
    text = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_BYTES:
        raise NotPlainError(f"{len(text)} bytes of data; at most {MAX_BYTES} can be exchanged")
    return len(text).to_bytes(4, "big") + text


def unpack(read: Callable[[int], bytes]) -> dict[str, Any]:
    """The next message.

    Raises:
        EOFError: the other side is gone.
        ProtocolError: it does not speak this language.
    """
    length = int.from_bytes(read(4), "big")
    if length > MAX_BYTES:
        raise ProtocolError(f"a message of {length} bytes")
    try:
        message = json.loads(read(length).decode("ascii"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"no JSON: {error}") from None
    if type(message) is not dict:
        raise ProtocolError("no message")
    return message


def reader(fd: int) -> Callable[[int], bytes]:
    """Reads exactly so many bytes of a descriptor, or raises ``EOFError``."""

    def read(count: int) -> bytes:
        parts = []
        while count:
            part = os.read(fd, min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    return read


def write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
