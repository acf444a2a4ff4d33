"""The command line of a Hydra program, and the configs that it names, as one mapping.

What Hydra does with ``key=value``, ``+``, ``++``, ``~`` and ``--config-name``, in its grammar for values
(https://hydra.cc/docs/advanced/override_grammar/basic/). A ``defaults`` list is followed to files beside the
config; of the configs that come with the program, only the names are known: they are returned as ``bases``. What cannot
be followed is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemorl.base.text.reading import expanded
from nemorl.errors import DataError

from nemorl_compat import legacy_yaml

FLAGS = {
    "--config-name": "name",
    "-cn": "name",
    "--config-path": "path",
    "-cp": "path",
    "--config-dir": "dir",
    "-cd": "dir",
}
WITHOUT_EFFECT = ("hydra.run.dir", "hydra.searchpath", "hydra.output_subdir", "hydra.job.name", "hydra.job.chdir")
"""Of Hydra's own settings: where it writes and looks. Others are kept, hence refused."""
SELF = "_self_"
_KEY = re.compile(r"(~|\+\+|\+)?([^\s=~+@{}$()\"'][^\s=@]*)(?:@([^\s=]+))?(?:=(.*))?", re.DOTALL)


@dataclass
class Composed:
    """The settings of a command line and its configs."""

    values: dict[str, Any] = field(default_factory=dict)
    """Nested; interpolations as they are"""
    bases: list[str] = field(default_factory=list)
    """Configs that come with the program"""
    choices: dict[str, str] = field(default_factory=dict)
    """Config group -> the member that was chosen, of groups that come with the program"""


def compose(words: Sequence[str], folders: Sequence[Path], *, known: Mapping[str, Sequence[str]]) -> Composed:
    """The arguments of a Hydra program, with the configs that they name.

    Args:
        words: Arguments.
        folders: Where relative paths of configs may begin.
        known: Config groups that come with the program -> their members; ``""`` are configs without a group.

    Raises:
        DataError: an override cannot be read, asks for several runs, or names a config that is not here.
    """
    flags, overrides = _split(words)
    composed = Composed()
    name = flags.get("name", "")
    if name:
        named = [expanded(flags[kind].removeprefix("file://")) for kind in ("path", "dir") if kind in flags]
        places = [folder / path for path in named for folder in folders]
        _include(composed, name.removesuffix(".yaml"), "", places, known)
    for text in overrides:
        _override(composed, text, known)
    return composed


def compose_file(path: Path, *, known: Mapping[str, Sequence[str]]) -> Composed:
    """A config file with what its ``defaults`` name; as :func:`compose`."""
    composed = Composed()
    _include_file(composed, path, "", [path.parent], known)
    return composed


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    flags: dict[str, str] = {}
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            flags[FLAGS[flag]] = value if equals else next(rest, "")
        elif word.startswith("-"):
            raise DataError(
                f"the option {word} of Hydra is not read", fix="leave it out, or give Hydra's resolved config"
            )
        else:
            overrides.append(word)
    return flags, overrides


def _include(
    composed: Composed, name: str, package: str, places: Sequence[Path], known: Mapping[str, Sequence[str]]
) -> None:
    """A config file with what its ``defaults`` name, on top of what is there."""
    path = next((place / f"{name}.yaml" for place in places if (place / f"{name}.yaml").is_file()), None)
    if path is None:
        group, _, member = name.rpartition("/")
        if member not in known.get(group, ()):
            where = f" in {' or '.join(map(str, places))}" if places else ""
            fix = "run this from the folder that the script is meant for, or give the config that Hydra wrote of a run"
            raise DataError(f"there is no config {name}.yaml{where}", fix=fix)
        if group:
            composed.choices[group] = member
        else:
            composed.bases.append(member)
        return
    _include_file(composed, path, package, places, known)


def _include_file(
    composed: Composed, path: Path, package: str, places: Sequence[Path], known: Mapping[str, Sequence[str]]
) -> None:
    own = legacy_yaml.loaded(path)
    defaults = own.pop("defaults", [])
    own.pop("hydra", None)
    if not isinstance(defaults, list):
        raise DataError(f"{path}: `defaults` is {defaults!r}", fix="give a list")
    if SELF not in defaults:
        defaults = [*defaults, SELF]
    for item in defaults:
        if item == SELF:
            _merge(composed.values, _below(package, own))
        elif isinstance(item, str):
            _include(
                composed,
                item.lstrip("/").removesuffix(".yaml"),
                item.rpartition("/")[0].strip("/").replace("/", "."),
                places,
                known,
            )
        else:
            _choose(composed, item, places, known, path)


def _choose(
    composed: Composed, item: Any, places: Sequence[Path], known: Mapping[str, Sequence[str]], path: Path
) -> None:
    """``group: member``, ``group@package: member``, with ``override`` and ``optional`` before."""
    if not isinstance(item, Mapping) or len(item) != 1:
        raise DataError(f"{path}: {item!r} in `defaults` is not read", fix="write `group: member`")
    (key, member), *_ = item.items()
    words = str(key).split()
    group, _, package = words[-1].lstrip("/").partition("@")
    if member is None:
        return
    if not isinstance(member, str) or "$" in member:
        raise DataError(f"{path}: {key}: {member!r} in `defaults` is not read", fix="name one member of the group")
    try:
        _include(composed, f"{group}/{member}", package or group.replace("/", "."), places, known)
    except DataError:
        if "optional" not in words:
            raise


def _override(composed: Composed, text: str, known: Mapping[str, Sequence[str]]) -> None:
    found = _KEY.fullmatch(text)
    if found is None or (found[4] is None and found[1] != "~"):
        raise DataError(f"{text!r} is no override that Hydra reads", fix="write key=value")
    sign, key, package, given = found.groups()
    if key.startswith(WITHOUT_EFFECT):
        return
    if sign == "~":
        _delete(composed.values, key.split("."))
        return
    value = parse_value(given)
    group = key.replace(".", "/")
    if group in known and isinstance(value, str):
        if value not in known[group]:
            raise DataError(
                f"{text}: {value} is no member of {group} that is known", fix=f"known: {', '.join(known[group])}"
            )
        composed.choices[group] = value
        return
    if package:
        raise DataError(f"{text!r} chooses a config that is not here", fix="give Hydra's resolved config")
    place = composed.values
    *parents, last = key.split(".")
    for parent in parents:
        below = place.get(parent)
        if not isinstance(below, dict):
            place[parent] = below = {}
        place = below
    if isinstance(value, dict) and isinstance(place.get(last), dict) and sign != "++":
        _merge(place[last], value)
    else:
        place[last] = value


def _delete(tree: dict[str, Any], parts: Sequence[str]) -> None:
    for part in parts[:-1]:
        below = tree.get(part)
        if not isinstance(below, dict):
            return
        tree = below
    tree.pop(parts[-1], None)


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def _below(package: str, tree: dict[str, Any]) -> dict[str, Any]:
    for part in reversed(package.split(".") if package else []):
        tree = {part: tree}
    return tree


def parse_value(text: str) -> Any:
    """A value as Hydra reads it: quoted text, lists, mappings, numbers, words; ``''`` is empty text.

    Raises:
        DataError: it is none, or several values (a sweep).
    """
    reader = _Values(text.strip())
    value = reader.value(ends="")
    if reader.rest():
        what = (
            "several values, which are several runs"
            if reader.rest().startswith(",")
            else "a value that Hydra does not read"
        )
        raise DataError(f"{text!r} is {what}", fix="give one value; quote what has special characters")
    return value


class _Values:
    """A reader of one text from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def rest(self) -> str:
        return self._text[self._place :]

    def value(self, ends: str) -> Any:
        self._skip()
        start = self.rest()[:1]
        if start == "[":
            return list(self._items("]"))
        if start == "{":
            return dict(self._pairs())
        if start and start in "\"'":
            return self._quoted(start)
        return self._word(ends)

    def _skip(self) -> None:
        while self.rest()[:1].isspace():
            self._place += 1

    def _take(self, expected: str) -> bool:
        self._skip()
        if self.rest()[: len(expected)] != expected:
            return False
        self._place += len(expected)
        return True

    def _need(self, expected: str) -> None:
        if not self._take(expected):
            raise DataError(
                f"{self._text!r}: {expected!r} is missing at {self.rest()[:20]!r}", fix="write it as Hydra does"
            )

    def _items(self, close: str) -> Iterator[Any]:
        self._need("[")
        if self._take(close):
            return
        while True:
            yield self.value(ends=f",{close}")
            if self._take(close):
                return
            self._need(",")

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        self._need("{")
        if self._take("}"):
            return
        while True:
            key = self.value(ends=":}")
            self._need(":")
            yield key, self.value(ends=",}")
            if self._take("}"):
                return
            self._need(",")

    def _quoted(self, quote: str) -> str:
        """Inside, backslashes before the quote escape it; all others stay."""
        made, place = "", self._place + 1
        while place < len(self._text):
            char = self._text[place]
            if char == "\\":
                run = len(self._text[place:]) - len(self._text[place:].lstrip("\\"))
                place += run
                if self._text[place : place + 1] == quote:
                    made += "\\" * (run // 2)
                    if run % 2:
                        made, place = made + quote, place + 1
                else:
                    made += "\\" * run
                continue
            place += 1
            if char == quote:
                self._place = place
                return made
            made += char
        raise DataError(f"{self._text!r} has an open quote", fix="close it")

    def _word(self, ends: str) -> Any:
        """Up to a comma or a bracket; interpolations are taken whole, a backslash keeps what follows."""
        made, place, escaped = "", self._place, False
        while place < len(self._text):
            char = self._text[place]
            if self._text.startswith("${", place):
                end = _closing(self._text, place + 1)
                made, place = made + self._text[place:end], end
            elif char == "\\" and self._text[place + 1 : place + 2] in tuple("\\()[]{}:=, \t"):
                made, place, escaped = made + self._text[place + 1], place + 2, True
            elif char == "," or char in ends or char in "[]{}()\"'":
                break
            else:
                made, place = made + char, place + 1
        if place == self._place and ends:
            raise DataError(f"{self._text!r}: a value is missing at {self.rest()[:20]!r}", fix="write it as Hydra does")
        if self._text[place : place + 1] == "(":
            raise DataError(f"{self._text!r} calls a function of Hydra, which is not read", fix="write the value out")
        self._place = place
        return made.strip() if escaped else scalar(made.strip())


def _closing(text: str, place: int) -> int:
    """Behind the brace that closes the one at ``place``."""
    depth = 0
    for index in range(place, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    raise DataError(f"{text!r} has an open brace", fix="close it")


_INT = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
_DIGITS = r"(0|[1-9](_?[0-9])*)"
_FLOAT = re.compile(
    rf"[+-]?({_DIGITS}\.[0-9_]*|\.[0-9][0-9_]*|{_DIGITS}(?=[eE]))([eE][+-]?[0-9]+)?|[+-]?(inf|nan)", re.IGNORECASE
)
_WORDS = {"true": True, "false": False, "null": None}


def scalar(text: str) -> Any:
    """``1e-6`` is a number, ``True`` is true, ``null`` nothing; all else is text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text
