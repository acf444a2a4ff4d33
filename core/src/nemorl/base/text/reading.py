"""Text that people and programs wrote, as plain data within limits; every refusal is one sentence.

Read here: files and JSON, of configs and of rows. A text is refused when it is nested deeper, expands to more
values or is longer than anything meant, repeats a key, or holds what is no text (half of a surrogate pair).
YAML, within the same limits, is in ``yaml_text``.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 1 << 20
"""A config of a thousand lines has about 50 kB."""
MAX_DEPTH = 64
"""Mappings and lists inside each other; the deepest config in use has seven."""
MAX_VALUES = 100_000
"""Values of one config, aliases written out: twenty lines of aliases can stand for more than memory holds."""
SHOWN = 80
"""Characters of a wrong value in a message."""
ENCODINGS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class UnreadableError(ValueError):
    """A text that is refused. The message says where and why; callers add the file and the fix."""


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """The text of a regular file in UTF-8, with or without a byte order mark.

    Raises:
        UnreadableError: it is a folder or a pipe, too long, in another encoding, or cannot be opened.
    """
    if "\0" in str(path):
        raise UnreadableError("its name holds a NUL byte")
    try:
        if (what := kind_of(path)) != "file":
            raise UnreadableError(f"it is a {what}, not a file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise UnreadableError(f"it cannot be read ({error.strerror})") from error
    if len(content) > max_bytes:
        raise UnreadableError(f"it is longer than {max_bytes:,} bytes")
    encoding = next((name for mark, name in ENCODINGS.items() if content.startswith(mark)), None)
    if encoding is not None:
        raise UnreadableError(f"it is {encoding}, not UTF-8: save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"line {line}: not UTF-8 text ({error.reason})") from error
    if "\0" in text:
        raise UnreadableError(f"line {text.count(chr(10), 0, text.index(chr(0))) + 1}: a NUL byte: this is no text")
    return text


def expanded(path: str | Path) -> Path:
    """The path with ``~`` as a home directory; ``~nobody`` stays as it is, where ``Path.expanduser`` raises."""
    return Path(os.path.expanduser(path))


def is_file(path: str | Path) -> bool:
    """A file is there. ``False`` also for what can be no path: a name too long, a NUL byte, a folder that is closed."""
    return os.path.isfile(path)  # Path.is_file raises for them


def is_folder(path: str | Path) -> bool:
    """A folder is there; else as :func:`is_file`."""
    return os.path.isdir(path)


def may_be_there(path: Path) -> bool:
    """Whether something, a dangling link say, is at a path, or that cannot be told, as its folder is closed."""
    try:
        path.lstat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def kind_of(path: Path) -> str:
    """``file``, ``folder``, ``pipe`` or ``device``. Opening a pipe would wait for who writes into it."""
    mode = path.stat().st_mode
    names = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return names.get(stat.S_IFMT(mode), "device")


def parse_json(text: str | bytes) -> Any:
    """JSON in which no object repeats a key.

    Raises:
        UnreadableError: it is not valid, repeats a key, is too deep, or holds half of a surrogate pair.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise UnreadableError(f"nested deeper than {MAX_DEPTH} levels") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"not UTF-8 text ({error.reason})") from error
    except UnreadableError:
        raise
    except ValueError as error:  # a whole number of more digits than Python converts
        raise UnreadableError("a whole number of thousands of digits") from error
    if _needs_a_look(text):
        check_tree(data, max_values=None)
    return data


def _needs_a_look(text: str | bytes) -> bool:
    """It has brackets enough to be too deep, or escapes, which may be half of a pair: rows rarely do."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{") > MAX_DEPTH or b"\\u" in text
    return text.count("[") + text.count("{") > MAX_DEPTH or "\\u" in text


def check_tree(data: Any, max_values: int | None = MAX_VALUES) -> None:
    """Refuse nested data that is too deep or too large, has other keys than text, or texts that are none.

    Only lists, tuples and mappings are looked into; other objects are somebody else's.

    Raises:
        UnreadableError: names the first finding.
    """
    count, below = 0, [(data, 1)]
    while below:
        value, depth = below.pop()
        count += 1
        if max_values is not None and count > max_values:
            raise UnreadableError(f"it holds more than {max_values:,} values")
        if isinstance(value, str):
            _check_text(value)
        children: Iterable[Any] = ()
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise UnreadableError(f"the key {shown(key)} is not text: put it in quotes")
                _check_text(key)
            children = value.values()
        elif isinstance(value, list | tuple):
            children = value
        if depth > MAX_DEPTH and isinstance(value, Mapping | list | tuple):
            raise UnreadableError(f"nested deeper than {MAX_DEPTH} levels")
        below += [(child, depth + 1) for child in children]


def unshared(data: Any) -> Any:
    """Data whose mappings and lists are its own: a change of one place changes no other."""
    if isinstance(data, Mapping):
        return {key: unshared(value) for key, value in data.items()}
    return [unshared(value) for value in data] if isinstance(data, list) else data


def shown(value: Any) -> str:
    """A value as it is written, cut where it is long."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, or a list in a list in a list …
        return f"a very large {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableError(f"{shown(text)} holds half of a surrogate pair, which is no character") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise UnreadableError(f"the key {shown(twice)} appears twice")
    return found
