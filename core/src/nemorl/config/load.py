"""From a file, a dict or Python to a checked config; every mistake reported at once.

First all fields; then, on what is left without those that are wrong, everything that fields say together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from nemorl.base.text.mappings import apply_overrides, checked, read_source
from nemorl.base.text.reading import shown, unshared
from nemorl.base.text.suggest import closest
from nemorl.config.base import DEFERRED, ELSEWHERE, PLUGINS, PROBLEM, Config, all_problems
from nemorl.config.explain import explain
from nemorl.config.plugin_lists import policy_in
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ConfigIssue, NemorlError, PluginNotFoundError
from nemorl.plugins.registry import Registry, registry
from nemorl.plugins.slots import CONFIG_SECTION, foreign_words

AnyConfig = TypeVar("AnyConfig", bound=Config)


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    for_launch: bool = False,
    for_cluster: bool = False,
) -> RunConfig:
    """Read, override, validate.

    Args:
        source: Path of a ``.yaml``/``.yml``/``.json`` file, or a mapping of the same shape.
        overrides: ``dotted.path=value``; values are read as YAML and typed by the schema.
        for_launch: Also require what a run started from a file needs: data, and what scores it.
        for_cluster: The run is for other machines: nothing is wrong for want of a GPU, a package or a file on this one.

    Raises:
        ConfigError: with every problem found, each with its path and fix.

    >>> load_config({"algorithm": "sft", "model": "org/model"}, ["max_steps=10"]).max_steps
    10
    """
    name = str(source) if isinstance(source, (str, Path)) else "config"
    data, wrong = apply_overrides(read_source(source), overrides, name), list[ConfigIssue]()
    for section in filter(None, [CONFIG_SECTION.of(key).filled() for key in data]):
        data, mistakes = section.read(data)  # without a section such as `launch`, which is no part of the run itself
        wrong += mistakes
    plugins = registry().restricted(policy_in(data))
    algorithm, unknown = _algorithm_class(data, plugins)
    found = _Reading(algorithm, data, plugins, elsewhere=for_cluster)
    if unknown is not None:
        if (words := foreign_words("config", [name], data)) is not None:
            raise ConfigError([replace(unknown, fix=words)], source=name)  # every key of it would be wrong
        known = algorithm.model_fields
        rest = [one for one in found.issues if algorithm is not RunConfig or one.path.partition(".")[0] in known]
        found.issues = [unknown, *(issue for issue in rest if issue.path != unknown.path)]
    if found.config is not None and for_launch:
        lacks = found.config.launch_problems()
        found.issues += [lack for lack in lacks if not _is_at_or_above(lack.path, found.issues)]
    found.issues = [*wrong, *(issue for issue in found.issues if not (issue.here and for_cluster))]
    return found.result(name)


def validate(
    config_class: type[AnyConfig], data: Mapping[str, Any], source: str = "config", *, plugins: Registry | None = None
) -> AnyConfig:
    """A mapping as ``config_class``, with all problems at once (``load_config`` when the class is known).

    Args:
        config_class: What it is meant to be.
        data: The mapping.
        source: What errors call it.
        plugins: Those that may be used. Unset: those that the policy in ``data`` admits.
    """
    data = checked(data, source)
    return _Reading(config_class, data, plugins or registry().restricted(policy_in(data))).result(source)


class _Reading(Generic[AnyConfig]):
    """A mapping read as a config in two passes: all fields, then one walk over ``problems()`` of all that is there."""

    def __init__(
        self, config_class: type[AnyConfig], data: dict[str, Any], plugins: Registry, *, elsewhere: bool = False
    ) -> None:
        self._class, self._data = config_class, data
        self._context = {PLUGINS: plugins, DEFERRED: True, ELSEWHERE: elsewhere}
        self.issues: list[ConfigIssue] = []
        self.config: AnyConfig | None = None
        try:
            self.config = config_class.model_validate(data, context=self._context)
        except ValidationError as error:
            self.issues = list(self._explained(error))
            self.config = self._without([item["loc"] for item in error.errors(include_url=False)])
        if self.config is not None:
            for issue in all_problems(self.config):
                spelled = replace(issue, path=self._as_written(issue.path))
                if not _is_at_or_above(spelled.path, self.issues):
                    self.issues.append(spelled)

    def result(self, source: str) -> AnyConfig:
        """The config.

        Raises:
            ConfigError: every issue.
        """
        if self.issues or self.config is None:
            raise ConfigError(self.issues, source=source)
        return self.config

    def _explained(self, error: ValidationError) -> Iterable[ConfigIssue]:
        """One issue per place. Where a value may be of several kinds, pydantic tells of each why not."""
        found: dict[str, ConfigIssue] = {}
        for item in error.errors(include_url=False):
            if item["type"] == "default_factory_not_called":
                continue  # a default that follows from other fields, one of which is wrong and reported itself
            path = self._as_written(".".join(map(str, _place(self._data, item["loc"]))))
            if item["type"] == PROBLEM:
                issue = ConfigIssue(path, item["ctx"]["message"], item["ctx"]["fix"] or None)
            else:
                issue = explain(self._class, self._data, path, item)
            first = found.setdefault(path, issue)
            if first.fix and issue.fix and issue.fix not in first.fix:
                found[path] = replace(first, fix=f"{first.fix}, or {issue.fix}")
        return found.values()

    def _as_written(self, path: str) -> str:
        """``policy.model_name`` is ``model`` where that is how it was written."""
        for field, other in self._class.other_paths.items():
            section, _, key = field.partition(".")
            at = self._data.get(section)
            is_written = (at.get(key) if isinstance(at, Mapping) else None) if key else at
            if f"{path}.".startswith(f"{field}.") and not is_written:
                return other + path[len(field) :]
        return path

    def _without(self, wrong: Sequence[tuple[str | int, ...]]) -> AnyConfig | None:
        """The config without its wrong keys, to look for problems in it; ``None`` where that is no config."""
        rest = unshared(self._data)
        for location in wrong:
            _take_out(rest, self._as_written(".".join(map(str, location))).split("."))
        try:
            return self._class.model_validate(rest, context=self._context)
        except ValidationError:
            return None


def _place(data: Any, location: Sequence[str | int]) -> Iterator[str | int]:
    """A location without pydantic's names of the kinds that a value may be of: ``bool``, ``tuple[str, ...]``."""
    for part in location:
        is_kind = part in ("bool", "int", "float", "str") or (isinstance(part, str) and "[" in part)
        if is_kind and not isinstance(data, Mapping):
            continue
        yield part
        try:
            data = data[part]
        except (TypeError, LookupError):
            data = {}  # made on the way: nothing is known of it


def _algorithm_class(data: Mapping[str, Any], plugins: Registry) -> tuple[type[RunConfig], ConfigIssue | None]:
    """The class that reads a config. Where it names none: what is wrong with that, and the class that tells the rest,
    of the algorithm that is probably meant, else the one for what every run has."""
    name = data.get("algorithm")
    installed = [entry.name for entry in plugins.index.of_kind("algorithms") if not entry.diagnostics]
    if not isinstance(name, str):
        what = "no algorithm given" if name is None else f"expected the name of an algorithm, got {shown(name)}"
        return RunConfig, ConfigIssue("algorithm", what, f"set `algorithm:` to one of {', '.join(installed)}")
    try:
        loaded: type[RunConfig] = plugins.load("algorithms", name)
    except NemorlError as error:
        meant = closest(name, installed) if isinstance(error, PluginNotFoundError) else None
        issue = ConfigIssue("algorithm", error.message, error.fix)
        return RunConfig if meant is None else plugins.load("algorithms", meant), issue
    return loaded, None


def _is_at_or_above(path: str, issues: Sequence[ConfigIssue]) -> bool:
    """Whether something at or below ``path`` is known to be wrong: what was taken out there is not missing."""
    return any(f"{issue.path}.".startswith(f"{path}.") for issue in issues)


def _take_out(data: Any, location: Sequence[str]) -> None:
    """Remove the value at ``location``, or its closest ancestor that exists."""
    target, parents = data, [data]
    for key in location[:-1]:
        if not isinstance(target, dict) or key not in target:
            break
        target = target[key]
        parents.append(target)
    for holder, key in reversed(list(zip(parents, location, strict=False))):
        if isinstance(holder, dict) and key in holder:
            del holder[key]
            return
