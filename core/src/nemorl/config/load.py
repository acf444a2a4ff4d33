"""From a file, a dict or Python to a checked config; every mistake reported at once.

pydantic stops at the first layer that fails (field errors hide cross-field ones). So what is wrong is recorded, taken
out, and the rest is checked again, until nothing new is found.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from nemorl.config.base import PROBLEM, Config
from nemorl.config.explain import explain
from nemorl.config.plugin_lists import PluginsConfig
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ConfigIssue, NemorlError
from nemorl.plugins.registry import registry, restricted, use_registry
from nemorl.text.reading import UnreadableError, check_tree, expanded, parse_json, parse_yaml, read_text, shown

AnyConfig = TypeVar("AnyConfig", bound=Config)
MAX_ROUNDS = 10
"""Rounds of take-out-and-check; each must remove something, so real configs need two or three."""


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, for_launch: bool = False
) -> RunConfig:
    """Read, override, validate.

    Args:
        source: Path of a ``.yaml``/``.yml``/``.json`` file, or a mapping of the same shape.
        overrides: ``dotted.path=value``; values are read as YAML and typed by the schema.
        for_launch: Also require what a run started from a file needs: data, and what scores it.

    Raises:
        ConfigError: with every problem found, each with its path and fix.
    """
    name = str(source) if isinstance(source, (str, Path)) else "config"
    data = apply_overrides(read_source(source), overrides, name)
    problems: list[ConfigIssue] = []
    with use_registry(restricted(_plugin_policy(data))):
        config_class = _algorithm_class(data, name)
        config, problems = _validate(config_class, data)
        if config is not None and for_launch:
            problems += [lack for lack in config.launch_problems() if not _is_reported(lack.path, problems)]
    if problems or config is None:
        raise ConfigError(problems, source=name)
    return config


def validate(config_class: type[AnyConfig], data: Mapping[str, Any], source: str = "config") -> AnyConfig:
    """A mapping as ``config_class``, with all problems at once (``load_config`` when the class is known)."""
    config, problems = _validate(config_class, _checked(data, source))
    if problems or config is None:
        raise ConfigError(problems, source=source)
    return config


def read_source(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The raw mapping of a config file or mapping."""
    if isinstance(source, Mapping):
        return copy.deepcopy(_checked(source, "config"))
    path = expanded(source)
    if not path.exists():
        nearby = ", ".join(sorted(p.name for p in path.parent.glob("*.y*ml"))[:8]) if path.parent.is_dir() else ""
        fix = f"files here: {nearby}" if nearby else "give the path of a .yaml or .json file"
        raise ConfigError([ConfigIssue("", f"no config file {str(path)!r}", fix)], source=str(path))
    try:
        text = read_text(path)
    except UnreadableError as error:
        raise ConfigError(
            [ConfigIssue("", str(error), "give a .yaml or .json file in UTF-8")], source=str(path)
        ) from error
    form = path.suffix[1:].lower()
    try:
        data = parse_json(text) if form == "json" else parse_yaml(text)
        check_tree(data)
    except UnreadableError as error:
        raise ConfigError([ConfigIssue("", f"not valid {form or 'YAML'}: {error}")], source=str(path)) from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        fix = "write `key: value` lines, starting with `algorithm:`"
        raise ConfigError([ConfigIssue("", f"expected a mapping, found {found}", fix)], source=str(path))
    return data


def _checked(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    try:
        check_tree(data)
    except UnreadableError as error:
        raise ConfigError([ConfigIssue("", str(error))], source=source) from error
    return dict(data)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str], source: str = "config") -> dict[str, Any]:
    """``policy.optimizer.lr=1e-5`` on the raw mapping. A component given by name becomes a mapping on the way."""
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        named = f"override {shown(override)}"
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(ConfigIssue("", f"{named} is not `path=value`", "e.g. policy.precision=bfloat16"))
            continue
        target: Any = data
        for key in keys[:-1]:
            below = target.get(key)
            if isinstance(below, str):
                below = {"name": below}
            target[key] = target = {} if below is None else below
            if not isinstance(target, dict):
                problems.append(ConfigIssue(path, f"{named} goes through {key!r}, which is not a mapping"))
                break
        else:
            try:
                target[keys[-1]] = parse_yaml(text)
            except UnreadableError as error:
                message = f"the value of {named} is not valid YAML: {error}"
                problems.append(ConfigIssue(path, message, "put it in quotes"))
    if problems:
        raise ConfigError(problems, source=source)
    return data


def _plugin_policy(data: Mapping[str, Any]) -> Any:
    try:
        return PluginsConfig.model_validate(data.get("plugins") or {}).policy()
    except ValidationError:
        return PluginsConfig().policy()  # the same mistake is reported with all others below


def _algorithm_class(data: Mapping[str, Any], source: str) -> type[RunConfig]:
    name = data.get("algorithm")
    installed = [entry.name for entry in registry().index.of_kind("algorithms")]
    if not isinstance(name, str):
        what = "no algorithm given" if name is None else f"expected the name of an algorithm, got {shown(name)}"
        raise ConfigError(
            [ConfigIssue("algorithm", what, f"set `algorithm:` to one of {', '.join(installed)}")], source=source
        )
    try:
        loaded: type[RunConfig] = registry().load("algorithms", name)
    except NemorlError as error:
        raise ConfigError([ConfigIssue("algorithm", error.message, error.fix)], source=source) from error
    return loaded


def _validate(config_class: type[AnyConfig], data: dict[str, Any]) -> tuple[AnyConfig | None, list[ConfigIssue]]:
    remaining = copy.copy(data)
    found: dict[str, ConfigIssue] = {}
    for _ in range(MAX_ROUNDS):
        try:
            return config_class.model_validate(remaining), list(found.values())
        except ValidationError as error:
            located = list(_problems(config_class, data, error))
            fresh = [(loc, problem) for loc, problem in located if not _is_consequence(problem.path, found)]
            for _loc, problem in fresh:
                found[problem.path] = problem
            remaining = copy.deepcopy(remaining)
            removed = [_take_out(remaining, loc) for loc, _ in located]
            if not any(removed):
                break
    return None, list(found.values())


def _problems(
    config_class: type[Config], data: Mapping[str, Any], error: ValidationError
) -> Iterator[tuple[tuple[str | int, ...], ConfigIssue]]:
    for item in error.errors(include_url=False):
        location = item["loc"]
        if item["type"] == "default_factory_not_called":
            continue  # a default that follows from other fields, one of which is wrong and reported itself
        if item["type"] == "missing" and _is_given(data, location):
            continue  # it was wrong, and taken out
        policy = data.get("policy")
        if location == ("policy", "model_name") and not (isinstance(policy, Mapping) and policy.get("model_name")):
            location = ("model",)  # where the user wrote it
        path = ".".join(str(part) for part in location)
        if item["type"] == PROBLEM:
            context = item["ctx"]
            yield location, ConfigIssue(path, context["message"], context["fix"] or None)
        else:
            yield location, explain(config_class, data, path, item)


def _is_given(data: Any, location: Sequence[str | int]) -> bool:
    """Whether the user's config has something at ``location``."""
    for key in location:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


def _is_reported(path: str, problems: Sequence[ConfigIssue]) -> bool:
    """Whether something at or below ``path`` is known to be wrong: what was taken out there is not missing."""
    return any(f"{problem.path}.".startswith(f"{path}.") for problem in problems)


def _is_consequence(path: str, found: Mapping[str, ConfigIssue]) -> bool:
    return path in found or (path == "model" and "policy.model_name" in found)


def _take_out(data: Any, location: Sequence[str | int]) -> bool:
    """Remove the value at ``location``, or its closest existing ancestor. Whether anything was removed."""
    if not location:
        return False
    target, parents = data, [data]
    for key in location[:-1]:
        if not isinstance(target, dict) or key not in target:
            break
        target = target[key]
        parents.append(target)
    for depth in range(len(parents) - 1, -1, -1):
        holder, key = parents[depth], location[depth]
        if isinstance(holder, dict) and key in holder:
            del holder[key]
            if key == "model" and isinstance(holder.get("policy"), dict):
                holder["policy"].pop("model_name", None)
            return True
    return False
