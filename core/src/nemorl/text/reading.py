"""Text that people and programs wrote, as plain data: YAML and JSON within limits, every refusal one sentence.

Read here: configs, overrides and rows of JSON Lines. A text is refused when it is nested deeper, expands to more
values or is longer than anything meant, repeats a key, or holds what is no text (half of a surrogate pair).
YAML is read as version 1.2 means it where 1.1 surprises: ``yes``, ``010``, ``1:30`` and ``2024-01-01`` are text.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

MAX_CONFIG_BYTES = 1 << 20
"""A config of a thousand lines has about 50 kB."""
MAX_DEPTH = 64
"""Mappings and lists inside each other; the deepest config in use has seven."""
MAX_VALUES = 100_000
"""Values of one config, aliases written out: twenty lines of aliases can stand for more than memory holds."""
MAX_DIGITS = 40
"""Of a whole number in YAML; Python refuses to print one of 4,301."""
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


def parse_yaml(text: str) -> Any:
    """One YAML document of text, numbers, true/false, null, lists and mappings with text as keys.

    Raises:
        UnreadableError: it is not valid, or goes beyond the limits of this module.
    """
    try:
        text.encode()  # what the command line could not decode is not text either
        loader = _Loader(text)
        try:
            _check_events(loader)
        finally:
            loader.dispose()
        data = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise UnreadableError(where + (error.problem or "not valid")) from error
    except yaml.YAMLError as error:
        raise UnreadableError(" ".join(str(error).split())) from error
    except UnicodeEncodeError as error:
        raise UnreadableError("it holds bytes that are not UTF-8") from error
    check_tree(data)
    return _unshared(data)


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


def _unshared(data: Any) -> Any:
    """Without the sharing that aliases make: a change of one place must not change another."""
    if isinstance(data, dict):
        return {key: _unshared(value) for key, value in data.items()}
    return [_unshared(value) for value in data] if isinstance(data, list) else data


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
        keys = [key for key, _ in pairs]
        raise UnreadableError(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} appears twice")
    return found


# YAML

TAG = "tag:yaml.org,2002:"
STR = f"{TAG}str"
_TAGS = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
"""Plain words that are not text, and the characters they begin with. ``1e-5`` is text to YAML 1.1 and to files written
for it (so may be the name of a commit): number fields read it."""


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Text, numbers, true/false, null, lists, mappings and merge keys: no dates, sets or bytes."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    yaml_constructors: dict[str, Any] = {}  # noqa: RUF012


def _whole_number(loader: Any, node: yaml.ScalarNode) -> int:
    if len(node.value) > MAX_DIGITS:
        raise _refusal(f"a whole number of {len(node.value)} digits", node.start_mark)
    number: int = yaml.SafeLoader.construct_yaml_int(loader, node)  # type: ignore[no-untyped-call]
    return number


for _name, (_pattern, _first) in _TAGS.items():
    _Loader.add_implicit_resolver(f"{TAG}{_name}", re.compile(f"(?:{_pattern})\\Z"), [c.strip("\0") for c in _first])
for _name in ("null", "bool", "float", "str", "seq", "map"):
    _Loader.add_constructor(f"{TAG}{_name}", getattr(yaml.SafeLoader, f"construct_yaml_{_name}"))
_Loader.add_constructor(f"{TAG}int", _whole_number)


def _refusal(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)


class _Open:
    """A list or mapping whose end has not come."""

    def __init__(self, event: Any) -> None:
        self.anchor = event.anchor
        self.is_mapping = isinstance(event, yaml.MappingStartEvent)
        self.keys: set[str] = set()
        self.awaits_key = self.is_mapping
        self.values = 1


def _check_events(loader: Any) -> None:
    """Depth, number of values, and keys: before anything is built, so that nothing large or deep ever is."""
    open_: list[_Open] = []
    sizes: dict[str, int] = {}
    while loader.check_event():
        event = loader.get_event()
        if getattr(event, "tag", None) not in (None, STR):
            raise _refusal(f"the tag {event.tag} is not read here: write the value alone", event.start_mark)
        if isinstance(event, yaml.ScalarEvent) and open_ and open_[-1].awaits_key:
            _check_key(loader, open_[-1], event)
        elif isinstance(event, yaml.ScalarEvent):
            _add(open_, 1, event)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = open_.pop()
            if done.anchor is not None:
                sizes[done.anchor] = done.values
            _add(open_, done.values, event)
        elif isinstance(event, yaml.NodeEvent):
            _check_node(open_, sizes, event)


def _check_node(open_: list[_Open], sizes: dict[str, int], event: Any) -> None:
    """An alias, or the start of a list or mapping."""
    if open_ and open_[-1].awaits_key:
        raise _refusal("a key must be text, not an alias, list or mapping", event.start_mark)
    if isinstance(event, yaml.AliasEvent):
        if any(holder.anchor == event.anchor for holder in open_):
            raise _refusal(f"the alias *{event.anchor} is inside what it stands for", event.start_mark)
        _add(open_, sizes.get(event.anchor or "", 1), event)
        return
    open_.append(_Open(event))
    if len(open_) > MAX_DEPTH:
        raise _refusal(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)


def _add(open_: list[_Open], values: int, event: Any) -> None:
    """A value of this many values has ended inside the innermost holder."""
    if not open_:
        return
    holder = open_[-1]
    holder.values += values
    holder.awaits_key = holder.is_mapping
    if holder.values > MAX_VALUES:
        raise _refusal(f"more than {MAX_VALUES:,} values, aliases written out", event.start_mark)


def _check_key(loader: Any, holder: _Open, event: Any) -> None:
    tag = event.tag or loader.resolve(yaml.ScalarNode, event.value, event.implicit)
    if tag not in (STR, f"{TAG}merge"):
        raise _refusal(f"the key {shown(event.value)} is not text: put it in quotes", event.start_mark)
    if event.value in holder.keys:
        raise _refusal(f"the key {shown(event.value)} appears twice", event.start_mark)
    holder.keys.add(event.value)
    holder.awaits_key = False
