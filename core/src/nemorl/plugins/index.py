"""The index: what is installed, by whom, allowed, unique and compatible. Imports no plugin code, ever.

Reads distribution metadata only (``entry_points.txt``, ``Requires-Dist``), so a plugin that fails to import, sleeps
or exits on import cannot disturb ``nemorl --help``, ``plugins list`` or a run that does not use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemorl.base.packages.distributions import RECORD, InstalledDistribution, installed, points_of
from nemorl.base.packages.owner import DAMAGED, DamagedPoint, described, owner_of
from nemorl.base.packages.plugin_policy import HOUSE, PluginPolicy, machine_policy, normalize
from nemorl.base.packages.standard_plugins import STANDARD_PLUGINS, how_to_install, todays_id
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import PluginError, PluginNotFoundError, UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One reason why one plugin cannot be used: shown by ``plugins list``, raised only when the plugin is selected."""

    state: str
    """Short word for tables: ``blocked``, ``ambiguous``, ``incompatible``, ``missing``, ``broken``, …"""
    code: str
    """Stable, e.g. ``NRL103``; documented in docs/plugins.md."""
    plugin: str
    """``distribution:name``"""
    message: str
    fix: str
    cause: str | None = None
    """The exception behind it, as text."""

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)


PREFIX = "nemorl."
KINDS = (
    "algorithms",
    "training_backends",
    "generation_backends",
    "environments",
    "datasets",
    "loggers",
    "weight_transports",
    "hooks",
    "commands",
    "templates",
    "report_sections",
)
"""Entry-point groups, without the ``nemorl.`` prefix."""

NAMES = "nemorl.names"
"""Group of what ``import nemorl`` offers besides the kernel's own: ``train = "nemorl_rl.api:train"``."""

SLOTS = "nemorl.slots"
"""Group of what fills a slot (:mod:`nemorl.plugins.slots`)."""

FINDERS = "nemorl.plugin_finders"
"""Group of functions ``find(prefix) -> entry points`` that look where pip of this environment did not install. Only
those of the house are called: whoever finds plugins runs in every command."""

LAUNCH_CHECKS = "nemorl.launch_checks"
"""Group of functions ``check(config, run_dir, warn) -> problems`` that may refuse a run before anything is loaded. Only
those of the house and of the standard plugins are called: whoever checks runs in every run."""

LAUNCHERS = "nemorl.launchers"
"""Group that ``nemorl launch`` reads."""

NO_PLUGINS = frozenset({NAMES, SLOTS, FINDERS, LAUNCH_CHECKS, LAUNCHERS})

CAN_BE_ISOLATED = frozenset(
    {"training_backends", "generation_backends", "environments", "datasets", "loggers", "templates"}
)
"""Kinds that work from a virtual environment of their own: workers, whose calls carry plain data, and files."""

OWN_COMMANDS = frozenset(
    {"train", "eval", "generate", "runs", "export", "report", "view", "compare", "plugins", "config"}
    | {f"plugins.{name}" for name in ("list", "show", "check", "install", "uninstall", "search", "index")}
    | {"runs.list", "runs.prune", "view.samples", "view.watch", "compare.metrics", "compare.configs"}
    | {f"config.{name}" for name in ("validate", "show", "docs", "schema", "templates")}
)
"""Commands of the kernel's own command line, which no plugin may take the place of."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REQUIREMENT = re.compile(r"nemorl[-_.]+core(?![-_.]*\w)", re.IGNORECASE)


def singular(kind: str) -> str:
    """``training_backends`` -> ``training backend``, for messages."""
    return kind.removesuffix("s").replace("_", " ")


def a_kind(kind: str) -> str:
    """``environments`` -> ``an environment``."""
    name = singular(kind)
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def kind_called(text: str) -> str:
    """``training_backends`` for ``training_backends``, ``Training-Backend`` or ``training backend``.

    Raises:
        UsageError: there is no such kind; says which one was probably meant.
    """
    wanted = re.sub(r"[-\s]", "_", text.strip().lower()).removesuffix("s") + "s"
    if wanted not in KINDS:
        guess = did_you_mean(wanted, KINDS) or f"use one of {', '.join(KINDS)}"
        raise UsageError(f"there is no plugin kind {text!r}", fix=guess)
    return wanted


class PluginHome(Protocol):
    """Another environment that a plugin is installed in."""

    @property
    def folder(self) -> Path: ...

    @property
    def python(self) -> Path:
        """Its interpreter."""
        ...

    @property
    def site_packages(self) -> Path: ...


class ForeignPoint(metadata.EntryPoint):
    """An entry point of another environment. Loading it gives what stands for the plugin in this one."""

    home: PluginHome

    def __init__(self, point: metadata.EntryPoint, dist: metadata.Distribution, home: PluginHome) -> None:
        super().__init__(point.name, point.value, point.group)
        vars(self).update(dist=dist, home=home)  # entry points refuse assignment


@dataclass(frozen=True)
class PluginEntry:
    """One component that some distribution offers, known from metadata alone."""

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    """``module:attribute`` of its config class"""
    point: metadata.EntryPoint = field(repr=False, compare=False)
    diagnostics: tuple[Diagnostic, ...] = field(default=(), compare=False)

    @property
    def id(self) -> str:
        """``distribution:name``: unambiguous even when two distributions use one name."""
        return f"{self.distribution}:{self.name}"

    @property
    def venv(self) -> PluginHome | None:
        """The virtual environment of an isolated plugin."""
        return self.point.home if isinstance(self.point, ForeignPoint) else None

    @property
    def search_path(self) -> list[str] | None:
        """Where its modules are looked for; ``None``: where this process imports from."""
        return [str(self.venv.site_packages)] if self.venv is not None else None

    @property
    def status(self) -> str:
        """``ok``, or the code of what stops it."""
        return self.diagnostics[0].state if self.diagnostics else "ok"

    def stopped(self, state: str, code: str, message: str, fix: str) -> PluginEntry:
        """This entry with a reason why it cannot be used, as a :class:`Diagnostic` has it."""
        return replace(self, diagnostics=(Diagnostic(state, code, self.id, message, fix),))


class Index:
    """All entries, each with the diagnostics that metadata alone can give."""

    def __init__(self, points: Sequence[metadata.EntryPoint], policy: PluginPolicy | None = None) -> None:
        self.policy = policy or PluginPolicy()
        self.points = tuple(points)
        """All that it was made of, whatever becomes of it."""

    @classmethod
    def installed(cls, policy: PluginPolicy | None = None) -> Index:
        """The index of this environment's distributions, in a stable order."""
        points: list[metadata.EntryPoint] = []
        for dist in installed():
            offered, damage = points_of(dist, PREFIX)
            points += offered
            if offered and damage is None and isinstance(dist, InstalledDistribution):
                damage = next(filter(None, map(dist.damage_of, (RECORD, "top_level.txt"))), None)
            if damage is not None:
                points.append(DamagedPoint(PREFIX + DAMAGED, dist, damage))
        # After this environment's own: a distribution that is in both is used from here.
        points += [point for find in _finders(points) for point in find(PREFIX)]
        return cls(points, machine_policy() if policy is None else policy)

    def narrowed(self, policy: PluginPolicy) -> Index:
        """This index under a further policy: what either refuses is refused."""
        if policy == PluginPolicy(import_timeout_s=self.policy.import_timeout_s):  # refuses and prefers nothing
            return self
        return Index(self.points, policy.within(self.policy))

    def with_entry(self, point: metadata.EntryPoint) -> Index:
        """This index and one more entry (``register_*`` decorators), in place of one that reads the same."""
        return Index((*(other for other in self.points if other != point), point), self.policy)

    @cached_property
    def names(self) -> Mapping[str, metadata.EntryPoint]:
        """Names that distributions contribute to ``nemorl``."""
        return self._first_of_each_name(NAMES)

    @cached_property
    def slots(self) -> Mapping[str, metadata.EntryPoint]:
        """Entry points that fill the slots."""
        return self._first_of_each_name(SLOTS)

    def keys_of(self, slot: str) -> list[str]:
        """Keys of a slot of many things that are filled."""
        return [name.removeprefix(f"{slot}.") for name in self.slots if name.startswith(f"{slot}.")]

    def _first_of_each_name(self, group: str) -> Mapping[str, metadata.EntryPoint]:
        """The entry points of a group, where the policy admits their distributions."""
        points = (p for p in self.points if p.group == group and self.policy.admits(owner_of(p)[0]))
        return {point.name: point for point in reversed([*points])}

    @property
    def launch_checks(self) -> Mapping[str, metadata.EntryPoint]:
        """Checks before a launch by ``distribution:name``, where the policy admits their distributions."""
        owned = [(owner_of(point)[0], point) for point in self.points if point.group == LAUNCH_CHECKS]
        known = HOUSE.union(STANDARD_PLUGINS.values())
        return {f"{who}:{point.name}": point for who, point in owned if who in known and self.policy.admits(who)}

    @cached_property
    def entries(self) -> tuple[PluginEntry, ...]:
        found: dict[tuple[str, str, str], PluginEntry] = {}
        for point in (point for point in self.points if point.group not in NO_PLUGINS):
            distribution, version, damage = owner_of(point)
            entry = PluginEntry(point.group.removeprefix(PREFIX), point.name, distribution, version, point.value, point)
            entry = entry if damage is None else _unreadable(entry, damage)
            # The same distribution twice on sys.path: the first one wins, as it does for import.
            found.setdefault((entry.kind, entry.name, normalize(distribution)), entry)
        everyone = sorted(found.values(), key=lambda entry: (entry.kind, entry.name, entry.id))
        groups = (list(group) for _, group in groupby(everyone, key=lambda entry: (entry.kind, entry.name)))
        return tuple(self._diagnose(entry, group) for group in groups for entry in group)

    def of_kind(self, kind: str) -> tuple[PluginEntry, ...]:
        return self._by_kind.get(kind, ())

    @cached_property
    def _by_kind(self) -> dict[str, tuple[PluginEntry, ...]]:
        return {kind: tuple(group) for kind, group in groupby(self.entries, key=lambda entry: entry.kind)}

    def find(self, kind: str, name: str) -> PluginEntry:
        """The usable entry called ``name`` (or ``distribution:name``).

        Raises:
            PluginNotFoundError: nothing of this kind has the name; lists what is installed and how to get it.
            PluginError: something has it but is blocked, ambiguous or incompatible; says why and what decides.
        """
        entries, name = self.of_kind(kind), todays_id(name)
        matches = [entry for entry in entries if name in (entry.name, entry.id)]
        # A full id says which of several distributions is meant.
        usable = [e for e in matches if not e.diagnostics or (name == e.id and e.status == "ambiguous")]
        if usable:
            return usable[0]
        if matches:
            diagnostic = matches[0].diagnostics[0]
            what = f"{singular(kind)} {name!r} from {matches[0].distribution}"
            raise PluginError(f"{what}: {diagnostic.message}", fix=diagnostic.fix)
        raise self._not_found(kind, name, entries)

    def _not_found(self, kind: str, name: str, entries: Sequence[PluginEntry]) -> PluginNotFoundError:
        installed = ", ".join(f"{e.name} from {e.distribution} {e.version}" for e in entries) or "none"
        guess = did_you_mean(name, [entry.name for entry in entries])
        provider = STANDARD_PLUGINS.get(f"{kind}:{name}")
        fix = guess or "pip install a plugin that provides it; `nemorl plugins list` shows what is installed"
        if provider:
            fix = how_to_install(provider)
        return PluginNotFoundError(f"no {singular(kind)} named {name!r} is installed (installed: {installed})", fix=fix)

    def _diagnose(self, entry: PluginEntry, namesakes: Sequence[PluginEntry]) -> PluginEntry:
        if entry.diagnostics:
            return entry
        if entry.kind not in KINDS:
            fix = did_you_mean(entry.kind, KINDS) or f"use one of {', '.join(KINDS)}"
            return entry.stopped("unknown-kind", "NRL110", f"nemorl has no plugin kind {entry.kind!r}", fix)
        if not _NAME.fullmatch(entry.name):
            fix = "use letters, digits, '-', '_' and '.', starting with a letter or digit"
            return entry.stopped("bad-name", "NRL111", f"{entry.name!r} is not a usable plugin name", fix)
        if entry.kind == "commands" and entry.name in OWN_COMMANDS:
            message = f"`nemorl {entry.name.replace('.', ' ')}` is nemorl's own command"
            return entry.stopped("taken", "NRL114", message, "rename the entry point")
        refusal = self._refusal(entry)
        if refusal is not None:
            message = f"distribution {entry.distribution} is not allowed: {refusal}"
            fix = "change plugins.allow or plugins.block there, or use another plugin"
            return entry.stopped("blocked", "NRL102", message, fix)
        if entry.venv is not None and entry.kind not in CAN_BE_ISOLATED:
            return entry.stopped(
                "not-isolable",
                "NRL112",
                f"{singular(entry.kind)} {entry.name!r} runs in the driver's process, and {entry.distribution} is "
                f"installed in an environment of its own ({entry.venv.folder})",
                f"install it here: nemorl plugins install {entry.distribution}",
            )
        return self._check_unique(_check_compatible(entry), namesakes)

    def _refusal(self, entry: PluginEntry) -> str | None:
        """Why the policy refuses an entry. What the running program registered is its own: no policy is asked."""
        return self.policy.refusal(entry.distribution) if entry.point.dist is not None else None

    def _check_unique(self, entry: PluginEntry, namesakes: Sequence[PluginEntry]) -> PluginEntry:
        rivals = [other for other in namesakes if self._refusal(other) is None]
        if entry.diagnostics or len(rivals) < 2:
            return entry
        key = f"{entry.kind}.{entry.name}"
        preferred = self.policy.preferred(key)
        if preferred is not None and normalize(preferred) == normalize(entry.distribution):
            return entry
        names = " and ".join(sorted(rival.distribution for rival in rivals))
        message = f"{names} both provide {singular(entry.kind)} {entry.name!r}"
        fix = f"choose one in the config, e.g. plugins.prefer: {{{key}: {entry.distribution}}}"
        return entry.stopped("ambiguous", "NRL103", message, fix)


def _finders(points: Sequence[metadata.EntryPoint]) -> list[Callable[[str], Iterable[metadata.EntryPoint]]]:
    return [point.load() for point in points if point.group == FINDERS and owner_of(point)[0] in HOUSE]


def _unreadable(entry: PluginEntry, damage: str) -> PluginEntry:
    fix = f"reinstall {entry.distribution}, or remove its .dist-info folder"
    return entry.stopped("unreadable", "NRL113", f"{entry.distribution} is damaged: {damage}", fix)


def requirement_on_kernel(entry: PluginEntry) -> Requirement | None:
    """Requirement of an entry's distribution on nemorl-core; ``None`` where it says nothing that applies here."""
    texts = described(entry.point.dist).requires if entry.point.dist is not None else ()
    found = (_applicable(text) for text in texts if _REQUIREMENT.match(text))
    return next((requirement for requirement in found if requirement is not None), None)


@cache
def _applicable(text: str) -> Requirement | None:
    """A requirement, if its marker admits this interpreter and no extra."""
    from packaging.requirements import Requirement  # 15 ms: only where a plugin states a requirement on the kernel

    requirement = Requirement(text)
    return requirement if requirement.marker is None or requirement.marker.evaluate({"extra": ""}) else None


def _check_compatible(entry: PluginEntry) -> PluginEntry:
    """The plugin's own requirement on nemorl-core, against the installed version."""
    from nemorl import __version__

    try:
        requirement = requirement_on_kernel(entry)
    except ValueError as error:
        return _unreadable(entry, f"it states a requirement that cannot be read ({' '.join(str(error).split())})")
    if requirement is None or requirement.specifier.contains(__version__, prereleases=True):
        return entry
    message = f"{entry.distribution} {entry.version} needs nemorl-core{requirement.specifier}, not {__version__}"
    fix = f"pip install -U {entry.distribution}, or install a matching nemorl-core"
    return entry.stopped("incompatible", "NRL104", message, fix)
