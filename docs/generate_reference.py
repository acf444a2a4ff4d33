"""Writes ``docs/reference/config.md`` from the config classes: every field with its type, default and meaning.

    python docs/generate_reference.py

Only the packages of this repository are described, whatever else is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from nemorl.base.text.field_texts import field_texts
from nemorl.config import RESUMABLE, Config, RunConfig
from nemorl.config.component import Component
from nemorl.plugins import registry
from nemorl.plugins.index import singular
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "config.md"
INTRO = """\
# Config reference

Generated from the config classes by `docs/generate_reference.py`; do not edit. How configs are loaded, overridden and
checked is told in [Configuration](../configuration.md).

A dotted path in a heading is where the keys go: `lr` under `policy.optimizer` is `policy.optimizer.lr`, in YAML, in
Python and on the command line.

↻: may differ when a run is continued; all below such a key too. See [Resuming](../checkpoints.md#resuming).
"""
BOUNDS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
KINDS = ("training_backends", "generation_backends", "environments", "datasets", "loggers")


def page() -> str:
    """The whole page."""
    return "\n".join([INTRO, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    yield "## Every run\n\nTop-level keys that all algorithms share.\n"
    yield _table(RunConfig)
    for path, nested in _nested(RunConfig):
        yield f"### `{path}`\n\n{_summary(nested)}\n"
        yield _table(nested)
    yield "## Algorithms\n\nTop-level keys, beside those of every run.\n"
    for entry in _entries("algorithms"):
        algorithm = registry().load("algorithms", entry.id)
        yield f"### `algorithm: {entry.name}`\n\n{_summary(algorithm)}\n"
        yield _table(algorithm, _own_fields(algorithm))
        for path, nested in _nested(algorithm, _own_fields(algorithm)):
            if nested not in {known for _, known in _nested(RunConfig)}:
                yield f"#### `{path}`\n\n{_summary(nested)}\n"
                yield _table(nested)
    for kind in KINDS:
        heading = singular(kind).capitalize() + "s"
        yield f"## {heading}\n\nKeys beside `name`. From Python: the class in brackets.\n"
        for entry in _entries(kind):
            plugin = registry().load(kind, entry.id)
            yield f"### `{entry.name}` ({entry.distribution}, `{plugin.__name__}`)\n\n{_summary(plugin)}\n"
            yield _table(plugin)


def _entries(kind: str) -> list[Any]:
    """Plugins of this repository's packages: what the metapackage depends on, with its extras but for the engines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["agents"], *extras["insight"], *extras["ops"]]
    ours = {re.split(r"[<>=!~ \[]", requirement)[0] for requirement in needed}
    return [entry for entry in registry().index.of_kind(kind) if entry.distribution in ours]


def _own_fields(algorithm: type[RunConfig]) -> list[str]:
    """Fields that the algorithm adds, or whose default or type it changes."""
    return [
        name
        for name, info in algorithm.model_fields.items()
        if name not in RunConfig.model_fields or _shape(info) != _shape(RunConfig.model_fields[name])
    ]


def _shape(info: FieldInfo) -> tuple[Any, Any]:
    return info.annotation, info.default


def _nested(
    owner: type[Config], names: list[str] | None = None, prefix: str = ""
) -> Iterator[tuple[str, type[Config]]]:
    """(dotted path, class) of every config inside ``owner``; plugins are described on their own."""
    for name, info in owner.model_fields.items():
        for position, inner in enumerate(configs_in(info) if names is None or name in names else ()):
            variant = f": {{name: {inner.model_fields['name'].default}, …}}" if position else ""
            yield prefix + name + variant, inner
            yield from _nested(inner, None, f"{prefix}{name}.")


def configs_in(info: FieldInfo) -> list[type[Config]]:
    """The config class of a field; several where a ``name`` tells them apart, the default one first."""
    if _component(info) is not None:
        return []
    return [m for m in _members(info.annotation) if isinstance(m, type) and issubclass(m, Config)]


def _component(info: FieldInfo) -> Component | None:
    found = [item for item in info.metadata if isinstance(item, Component)]
    for member in _members(info.annotation):
        candidates = get_args(member) if get_origin(member) is tuple else (member,)
        for candidate in candidates:
            if get_origin(candidate) is Annotated:
                found += [item for item in get_args(candidate)[1:] if isinstance(item, Component)]
    return found[0] if found else None


def _members(annotation: Any) -> tuple[Any, ...]:
    # `X | None` with a plain class is types.UnionType, with a generic typing.Union.
    is_union = get_origin(annotation) is Union or type(annotation).__name__ == "UnionType"
    return get_args(annotation) if is_union else (annotation,)


def _table(config: type[Config], names: list[str] | None = None) -> str:
    fields = [(name, info) for name, info in config.model_fields.items() if names is None or name in names]
    if not fields:
        return "No options.\n"
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    texts = field_texts(config)
    for name, info in fields:
        mark = " ↻" if RESUMABLE in info.metadata else ""
        lines.append(f"| `{name}`{mark} | {type_of(info)} | {default_of(info)} | {_prose(texts.get(name, ''))} |")
    return "\n".join(lines) + "\n"


def type_of(info: FieldInfo) -> str:
    """The type of a field in words, with its limits."""
    component = _component(info)
    if component is not None:
        word = singular(component.kind)
        article = "an" if word[0] in "aeiou" else "a"
        return f"list, each {article} {word}" if get_origin(info.annotation) is tuple else f"{article} {word}"
    words = "a mapping" if configs_in(info) else _words(info.annotation)
    limits = [f"{sign} {getattr(item, key)}" for item in info.metadata for kind, key, sign in BOUNDS
              if isinstance(item, kind)]  # fmt: skip
    limits += ["not empty" for item in info.metadata if isinstance(item, MinLen) and item.min_length]
    limits += [f"at most {item.max_length}" for item in info.metadata if isinstance(item, MaxLen)]
    return ", ".join([words, *limits])


def _words(annotation: Any) -> str:
    members = [member for member in _members(annotation) if member is not type(None)]
    return " or ".join(_word(member) for member in members)


def _word(member: Any) -> str:
    origin, arguments = get_origin(member), get_args(member)
    if origin is Literal:
        return " \\| ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        inner = _word(arguments[0])
        return f"list of {inner}" if arguments[-1] is Ellipsis else f"list of {len(arguments)} {inner}"
    if origin is dict:
        return f"mapping of {_word(arguments[0])} to {_word(arguments[1])}"
    names = {int: "int", float: "float", bool: "bool", str: "text", Path: "path"}
    return names.get(member, getattr(member, "__name__", str(member)))


def default_of(info: FieldInfo) -> str:
    """The default of a field as YAML in Markdown, "unset", "required" or "its defaults"."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=False)
    if info.default_factory is not None or isinstance(value, Config):
        changed = value.model_dump(exclude_unset=True) if isinstance(value, Config) else {}
        return ", ".join(f"`{key}: {_literal(item)}`" for key, item in changed.items()) or "its defaults"
    return "unset" if value is None or value == "" else f"`{_literal(value)}`"


def _literal(value: Any) -> str:
    """A value as it would be written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(f'"{item}"' if isinstance(item, str) else _literal(item) for item in value) + "]"
    return str(value)


def _summary(config: type[Config]) -> str:
    return _prose((config.__doc__ or "").strip().split("\n\n")[0])


def _prose(text: str) -> str:
    """A docstring on one line: reStructuredText literals as Markdown code, bars escaped for the table."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    from pages import update

    sys.exit(update({PAGE: page()}))
