"""From a config of NeMo RL to one of nemorl, without loss or not at all.

``legacy_yaml`` reads the old file, ``key_table`` judges every key, ``conversions`` make the new values; here the pieces
become one config, which is checked for the machines that it asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from nemorl.base.text.yaml_text import format_yaml
from nemorl.config import RunConfig, load_config
from nemorl.errors import ConfigError, ConfigIssue, NemorlError
from nemorl.plugins import registry
from nemorl_trust.secret_check import secrets_in

from nemorl_compat import legacy_yaml
from nemorl_compat.conversions import PARTS
from nemorl_compat.conversions.pieces import Pieces, put_mapped
from nemorl_compat.key_table import Kind, Outcome, judge, rows
from nemorl_compat.old_config import OldConfig

NO_EFFECT = "nothing here changes with it: it says what holds without it, or what it belongs to is turned off"
FIRST = ("algorithm", "model", "data", "environment")
"""Keys at the top of a config, in this order."""
BACKENDS = {
    "policy.backend": "training_backends",
    "teacher.backend": "training_backends",
    "critic.backend": "training_backends",
    "generation.backend": "generation_backends",
}


@dataclass(frozen=True)
class Change:
    """One key of the old config, and what became of it."""

    key: str
    value: Any
    outcome: Outcome
    is_allowed: bool = False
    """It is lost, and that was said to be all right"""


@dataclass(frozen=True)
class Migration:
    """An old config, translated."""

    config: Mapping[str, Any]
    """The new one: what differs from the defaults"""
    changes: Sequence[Change]
    """Every key of the old one, in its order"""
    problems: Sequence[ConfigIssue] = field(default=())
    """Why nemorl would not take the new config, on any machine"""

    def of(self, *kinds: Kind) -> list[Change]:
        """The keys of some classes."""
        return [change for change in self.changes if change.outcome.kind in kinds]

    @cached_property
    def refused(self) -> list[Change]:
        """Keys that ask for what nemorl has not, or that nobody knows, and whose loss was not allowed."""
        return [change for change in self.of("missing", "unknown") if not change.is_allowed]

    @cached_property
    def features(self) -> list[str]:
        """The missing features, by name."""
        named = [change.outcome.text for change in self.refused if change.outcome.kind == "missing"]
        unknown = [f"the unknown key {change.key}" for change in self.refused if change.outcome.kind == "unknown"]
        return list(dict.fromkeys([*named, *unknown, *(str(problem).split("\n")[0] for problem in self.problems)]))

    @property
    def is_complete(self) -> bool:
        """The new config loads, and nothing is lost that was not allowed to be."""
        return not self.refused and not self.problems

    def to_yaml(self) -> str:
        """The new config as a file."""
        return format_yaml(dict(self.config))


def migrate_file(path: Path, *, allow_loss: Iterable[str] = ()) -> Migration:
    """A config file with its parents, translated.

    Args:
        path: The file.
        allow_loss: Patterns of old keys that may be lost.

    Raises:
        DataError: it cannot be read.
        UsageError: it is no config of NeMo RL.
    """
    return migrate(legacy_yaml.read(path), folders=(path.absolute().parent, Path.cwd()), allow_loss=allow_loss)


def migrate(data: Mapping[str, Any], *, folders: tuple[Path, ...] = (), allow_loss: Iterable[str] = ()) -> Migration:
    """A resolved config of NeMo RL, translated.

    Args:
        data: Plain data: ``policy``, ``data``, ``cluster``, … and the algorithm's own section.
        folders: Where to look for prompt files.
        allow_loss: Patterns of old keys that may be lost.
    """
    training, moved = as_training(data)
    old = OldConfig(training, folders)
    judged = {key: judge(old, key, value) for key, value in old.leaves.items()}
    named = Pieces()
    put_mapped(old, named, judged)
    new = _with_parts(old, named)
    judged |= _without_effect(old, judged, named, new)
    _find_foreign(old, new, judged, options_of(str(new.values["algorithm"])))
    for key in judged.keys() & new.findings.keys():
        if judged[key].kind != "neutral":
            judged[key] = new.findings[key]
    known = tuple(allow_loss)
    changes = [
        Change(name, old.leaves[key], outcome, any(fnmatchcase(name, pattern) for pattern in known))
        for name, key, outcome in ((old_name(key, moved), key, outcome) for key, outcome in judged.items())
    ]
    unplaced = [Change(key, None, found) for key, found in new.findings.items() if key not in judged]
    return assembled(new.values, [*changes, *unplaced])


def _without_effect(old: OldConfig, judged: Mapping[str, Outcome], named: Pieces, new: Pieces) -> dict[str, Outcome]:
    """Keys that have a place here and whose value nonetheless changes nothing: the result is the same without them.

    Where another value would change it, what they say is what holds anyway.

    Args:
        old: The old config.
        judged: What becomes of each of its keys.
        named: The new config as far as values only have another name.
        new: All of it.
    """
    found: dict[str, Outcome] = {}
    for key in [key for key, outcome in judged.items() if outcome.kind == "mapped" and key not in new.findings]:
        value, target = old.get(key), judged[key].to
        if target in named.values:
            is_usual = any(row.to == target and row.default == value for row in rows(old.family))
            is_without = is_usual or named.values[target] != value
        else:
            is_without = old.has(key) and _makes(old.changed(key), named, new)
            is_usual = value is None or (is_without and _has_effect(old, key, named, new))
        if is_without:
            found[key] = Outcome("neutral", "same") if is_usual else Outcome("different", NO_EFFECT)
    return found


def _has_effect(old: OldConfig, key: str, named: Pieces, new: Pieces) -> bool:
    return any(not _makes(old.changed(key, value), named, new) for value in _other_values(old.get(key)))


def _makes(old: OldConfig, named: Pieces, new: Pieces) -> bool:
    try:
        other = _with_parts(old, named)
    except NemorlError:
        return False
    return (other.values, other.findings) == (new.values, new.findings)


def _with_parts(old: OldConfig, named: Pieces) -> Pieces:
    new = Pieces()
    new.values |= named.values
    for part in PARTS.values():
        part(old, new)
    return new


def _other_values(value: Any) -> Iterator[Any]:
    """Values of the same kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1, value / 2)
    else:
        yield from ("other", "float32", True, 1)


def assembled(values: Mapping[str, Any], changes: Sequence[Change], *, for_launch: bool = True) -> Migration:
    """The migration that values by path make: what differs from the defaults, checked unless it is refused.

    Args:
        values: Path of the new config -> value; ``algorithm`` among them.
        changes: Every key of the old config.
        for_launch: Also require data and what scores it.
    """
    config = _ordered(_trimmed(_nested(values), options_of(str(values["algorithm"]))))
    found = Migration(config, changes)
    return found if found.refused else Migration(config, changes, _problems(config, for_launch=for_launch))


def _find_foreign(old: OldConfig, new: Pieces, judged: dict[str, Outcome], defaults: Mapping[str, Any]) -> None:
    """Pieces that the algorithm has no option for: nothing where they ask for nothing, else a feature it lacks."""
    algorithm = new.values["algorithm"]
    for path in [path for path in new.values if path.partition(".")[0] not in defaults and path != "model"]:
        value = new.values.pop(path)
        for row in rows(old.family):
            if row.to is None or not f"{path}.".startswith(f"{row.to}."):
                continue
            for key in [key for key in row.keys if key in judged and judged[key].kind == "mapped"]:
                asks_nothing = value in (None, False, 0, "token", [], {}) or value == row.default
                judged[key] = (
                    Outcome("neutral", "same") if asks_nothing else Outcome("missing", f"{path} of {algorithm}")
                )


def options_of(algorithm: str) -> dict[str, Any]:
    """The options of an algorithm with their defaults, as plain data."""
    config_class: type[RunConfig] = registry().load("algorithms", algorithm)
    given: dict[str, Any] = {"model": "any/model"}
    if "teacher" in config_class.model_fields:
        given["teacher"] = {"model": "any/model"}
    dumped: dict[str, Any] = config_class.model_validate(given).model_dump(mode="json")
    return dumped


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        target = tree
        *parents, last = path.split(".")
        for key in parents:
            below = target.get(key)
            target[key] = target = {"name": below} if isinstance(below, str) else below or {}
        is_shadowed = isinstance(target.get(last), dict) and not isinstance(value, dict)
        target[last] = {"name": value, **target[last]} if is_shadowed else value
    return tree


def _trimmed(tree: Mapping[str, Any], defaults: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The values that differ from the defaults, or have none."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        default = defaults.get(key)
        if where in BACKENDS and value is not None:
            value = _trimmed_backend(where, value, default)  # noqa: PLW2901
        elif isinstance(value, Mapping) and isinstance(default, Mapping):
            value = _trimmed(value, default, where)  # noqa: PLW2901
        elif where not in ("algorithm", "model", "teacher.model") and _same(value, default):
            continue
        if value != {}:  # an empty list that is not the default says something
            kept[key] = value
    return kept


def _trimmed_backend(path: str, value: Any, default: Any) -> Any:
    given = value if isinstance(value, Mapping) else {"name": value}
    standard_name = default["name"] if isinstance(default, Mapping) else None
    name = str(given.get("name", standard_name))
    try:
        standard = registry().load(BACKENDS[path], name)().model_dump(mode="json")
    except NemorlError:
        standard = {}
    options = {key: v for key, v in given.items() if key != "name" and not _same(v, standard.get(key))}
    if options:
        return {"name": name, **options}
    return {} if name == standard_name else name


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, list | tuple):
        return isinstance(default, list | tuple | None) and list(value) == list(default or ())
    return bool(value == default and isinstance(value, bool) == isinstance(default, bool))


def _ordered(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tree[key] for key in sorted(tree, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))}


def _problems(tree: Mapping[str, Any], *, for_launch: bool) -> Sequence[ConfigIssue]:
    secrets = tuple(secrets_in(tree, "", "the new config"))
    try:
        load_config(tree, for_launch=for_launch, for_cluster=True)
    except ConfigError as error:
        return *secrets, *error.problems
    return secrets


# Configs of NeMo RL's evaluation


MOVED = {
    "generation.model_name": "policy.model_name",
    "generation.vllm_cfg.precision": "policy.precision",
    "generation.vllm_cfg.max_model_len": "policy.max_total_sequence_length",
}
"""Keys of an evaluation that belong to the policy of a training config."""


def as_training(data: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The config with a ``policy`` section, and which path of it was which of the old config; another one as it is."""
    is_evaluation = isinstance(data.get("eval"), Mapping) and isinstance(data.get("generation"), Mapping)
    if not is_evaluation or "policy" in data:
        return dict(data), {}
    generation = {**data["generation"]}
    engine = generation.get("vllm_cfg")
    generation["vllm_cfg"] = {**engine} if isinstance(engine, Mapping) else engine
    policy: dict[str, Any] = {}
    for old, new in MOVED.items():
        *parents, last = old.split(".")
        holder: Any = generation if len(parents) == 1 else generation["vllm_cfg"]
        if isinstance(holder, dict) and last in holder:
            policy[new.removeprefix("policy.")] = holder.pop(last)
    policy["generation"] = generation
    if "tokenizer" in data:
        policy["tokenizer"] = data["tokenizer"]
    rest = {key: value for key, value in data.items() if key not in ("generation", "tokenizer")}
    return {**rest, "policy": policy}, {new: old for old, new in MOVED.items()}


def old_name(key: str, moved: Mapping[str, str]) -> str:
    """The key as it stood in the old config."""
    return moved.get(key) or (key.removeprefix("policy.") if moved else key)
