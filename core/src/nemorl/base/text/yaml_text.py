"""YAML, read within the limits of ``reading`` and written so that every reader gets the same texts back.

It is read as version 1.2 means it where 1.1 surprises: ``yes``, ``010``, ``1:30`` and ``2024-01-01`` are text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from nemorl.base.text.reading import MAX_DEPTH, MAX_VALUES, UnreadableError, check_tree, shown, unshared

MAX_DIGITS = 40
"""Of a whole number; Python refuses to print one of 4,301."""
UNICODE_BREAKS = {"\x85", "\u2028", "\u2029"}


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
        raise UnreadableError(where + _in_words(error, text)) from error
    except yaml.YAMLError as error:
        raise UnreadableError(" ".join(str(error).split())) from error
    except UnicodeEncodeError as error:
        raise UnreadableError("it holds bytes that are not UTF-8") from error
    check_tree(data)
    return unshared(data)


def _in_words(error: yaml.MarkedYAMLError, text: str) -> str:
    lines, mark = text.splitlines(), error.problem_mark
    if mark is not None and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        return "a tab, which YAML does not allow here: indent with spaces, two for each level"
    return error.problem or "not valid"


def format_yaml(data: Any, *, one_line: bool = False) -> str:
    """Plain data as YAML, keys in their order: as lines, or as one line like ``{a: [1, 2]}``."""
    layout: Any = {"default_flow_style": True, "width": 1_000_000} if one_line else {}
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **layout)
    return text.removesuffix("...\n").strip() if one_line else text


# Reading

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
_TAGS_1_2 = {
    "int": (r"0o[0-7]+", "0"),
    "float": (r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+", "-+0123456789"),
}
"""Further words that are numbers to YAML 1.2."""


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Text, numbers, true/false, null, lists, mappings and merge keys: no dates, sets or bytes."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    yaml_constructors: dict[str, Any] = {}  # noqa: RUF012

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Write merged pairs out, those that win last: PyYAML 6.0.4 lets the last mapping of a list win, not the first.

        Source: https://yaml.org/type/merge.html ("Keys in mapping nodes earlier in the sequence override keys specified
        in later mapping nodes").
        """
        own, merged = [], []
        for key, value in node.value:
            if key.tag == f"{TAG}merge":
                several = isinstance(value, yaml.SequenceNode)
                merged += [self._merged(each) for each in (value.value if several else [value])]
            else:
                own.append((key, value))
        node.value = [pair for pairs in reversed(merged) for pair in pairs] + own

    def _merged(self, given: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
        if not isinstance(given, yaml.MappingNode):
            raise _refusal("<<: takes a mapping, or a list of mappings", given.start_mark)
        self.flatten_mapping(given)
        pairs: list[tuple[yaml.Node, yaml.Node]] = given.value
        return pairs


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


class _Dumper(yaml.SafeDumper):
    """Quotes a text that a reader of YAML 1.1, of 1.2 or of this module would take for something else."""


def _text(dumper: Any, text: str) -> Any:
    """In double quotes, as escapes, where it has line breaks of Unicode: PyYAML would make them spaces."""
    return dumper.represent_scalar(STR, text, style='"' if UNICODE_BREAKS & set(text) else None)


_Dumper.add_representer(str, _text)
for _name, (_pattern, _first) in (*_TAGS.items(), *_TAGS_1_2.items()):
    _resolver = re.compile(f"(?:{_pattern})\\Z"), [c.strip("\0") for c in _first]
    _Dumper.add_implicit_resolver(f"{TAG}{_name}", *_resolver)  # type: ignore[no-untyped-call]


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
