"""Loading by name: stevedore drivers fed by the index, and the process-wide registry.

Only a *selected* plugin's config module is imported. Stevedore's own disk cache is bypassed (it hides freshly
installed plugins); its load protocol and error callbacks are what we use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from stevedore import DriverManager

from nemorl.base.packages.plugin_policy import PluginPolicy
from nemorl.base.process.deadlines import deadline
from nemorl.errors import DeadlineError, ForeignError, NemorlError, PluginError, boundary
from nemorl.plugins.index import KINDS, PREFIX, Index, PluginEntry, singular

if TYPE_CHECKING:
    from nemorl.config.base import Config


class _IndexedDriver(DriverManager[Any]):
    """A stevedore driver whose candidates come from the index: one entry point, no scan, no cache."""

    def __init__(self, entry: PluginEntry) -> None:
        self._entry = entry
        super().__init__(
            namespace=PREFIX + entry.kind, name=entry.name, invoke_on_load=False, on_load_failure_callback=_fail
        )

    def list_entry_points(self) -> list[metadata.EntryPoint]:
        return [self._entry.point]


def _fail(_manager: object, _point: object, error: BaseException) -> None:
    raise error


class RegisteredPoint(metadata.EntryPoint):
    """An entry made by this process. It holds its object: nothing on disk needs to name it."""

    def __init__(self, name: str, value: str, group: str, target: Any) -> None:
        super().__init__(name, value, group)
        vars(self).update(target=target)  # entry points refuse assignment

    def load(self) -> Any:
        return vars(self)["target"]


class Registry:
    """Finds, loads and names plugins of one process."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._loaded: dict[tuple[str, str], Any] = {}

    def restricted(self, policy: PluginPolicy) -> Registry:
        """This registry, limited to what a policy admits as well."""
        return Registry(self.index.narrowed(policy))

    def load(self, kind: str, name: str) -> Any:
        """The object behind an entry: for most kinds, a config class.

        Raises:
            PluginNotFoundError: no such plugin.
            PluginError: it is blocked, ambiguous, incompatible, fails to import or is not what its kind promises.
        """
        entry = self.index.find(kind, name)
        key = (kind, entry.id)
        if key not in self._loaded:
            self._loaded[key] = self._import(entry)
        return self._loaded[key]

    def name_of(self, kind: str, config_class: type) -> str:
        """The shortest name under which ``load`` finds this class again.

        Raises:
            PluginError: the class belongs to no entry of this kind.
        """
        entry = self.entry_of(kind, config_class)
        return entry.name if not entry.diagnostics else entry.id

    def entry_of(self, kind: str, config_class: type) -> PluginEntry:
        """The entry whose config class this is.

        Raises:
            PluginError: the class belongs to no entry of this kind.
        """
        value = f"{config_class.__module__}:{config_class.__qualname__}"
        for entry in self.index.of_kind(kind):
            if entry.value == value or self._loaded.get((kind, entry.id)) is config_class:
                return entry
        raise PluginError(
            f"{value} is not registered as a {singular(kind)}",
            fix=f'add an entry point in the group "{PREFIX}{kind}", or @nemorl.plugins.register("{kind}", NAME)',
        )

    def register(self, kind: str, name: str, target: Any) -> None:
        """Add a config class of this process, next to the installed ones.

        The same class again replaces the earlier one, so that a notebook cell can run twice.

        Raises:
            PluginError: the kind is unknown, the class is not of it, or something else has the name.
        """
        if kind not in KINDS:
            raise PluginError(f"no plugin kind {kind!r}", fix=f"use one of {', '.join(KINDS)}")
        _checked(kind, name, target)
        point = RegisteredPoint(name, f"{target.__module__}:{target.__qualname__}", PREFIX + kind, target)
        for rival in self.index.of_kind(kind):
            if rival.name == name and rival.point != point and self.index.policy.admits(rival.distribution):
                raise PluginError(
                    f"{singular(kind)} {name!r} is taken: {rival.value} ({rival.distribution}) has it, "
                    f"{point.value} cannot",
                    fix="choose another name",
                )
        index = self.index.with_entry(point)
        entry = index.find(kind, name)
        self.index = index
        self._loaded[(kind, entry.id)] = target

    def _import(self, entry: PluginEntry) -> Any:
        owner = f"{singular(entry.kind)} {entry.name!r} from {entry.distribution} {entry.version}"
        try:
            limit_s = self.index.policy.import_timeout_s
            with boundary(owner), deadline(f"importing {owner}", limit_s, setting="plugins.import_timeout_s"):
                loaded = _IndexedDriver(entry).driver
        except (PluginError, DeadlineError):
            raise
        except NemorlError as error:
            cause = error.__cause__ if isinstance(error, ForeignError) else error
            raise PluginError(
                f"{owner} failed to load: {type(cause).__name__}: {cause}",
                fix=f"reinstall or update {entry.distribution}, or ask its authors; `nemorl plugins check {entry.id}` "
                "shows the traceback",
            ) from cause
        return _checked(entry.kind, entry.id, loaded)


BASES: Mapping[str, str] = {
    "algorithms": "nemorl.config.run:RunConfig",
    "training_backends": "nemorl.plugins.kinds:TrainingBackendConfig",
    "generation_backends": "nemorl.plugins.kinds:GenerationBackendConfig",
    "environments": "nemorl.plugins.kinds:EnvironmentConfig",
    "datasets": "nemorl.plugins.kinds:DatasetConfig",
    "loggers": "nemorl.plugins.kinds:LoggerConfig",
    "weight_transports": "nemorl.plugins.kinds:WeightTransportConfig",
    "hooks": "nemorl.plugins.kinds:HookConfig",
    "report_sections": "nemorl.plugins.kinds:ReportSectionConfig",
}
"""The class that the config of each kind subclasses, by name: configs are made of plugins, which come first."""


@cache
def config_bases() -> Mapping[str, type[Config]]:
    """The class that the config of each kind subclasses; commands and templates have none."""
    return {kind: metadata.EntryPoint(kind, value, "nemorl").load() for kind, value in BASES.items()}


def _checked(kind: str, name: str, loaded: Any) -> Any:
    base = config_bases().get(kind)
    if base is not None and not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise PluginError(
            f"{singular(kind)} {name!r} is {loaded!r}, not a subclass of {base.__module__}.{base.__name__}",
            fix="point the entry point at the plugin's config class",
        )
    return loaded


class _Process:
    """The registry of this process, made when it is first asked for."""

    registry: Registry | None = None


def registry() -> Registry:
    """Plugins that are installed here or registered by this program, under the policies of the site and the user.

    A run's own policy narrows it further: ``config.registry`` is what a run may use, and is passed on from there. What
    reaches another thread or process names a plugin by its full id, which means the same here.
    """
    if _Process.registry is None:
        _Process.registry = Registry(Index.installed())
    return _Process.registry


def replace_registry(other: Registry) -> Registry:
    """Make another registry that of this process, for tests; returns the one before."""
    before, _Process.registry = registry(), other
    return before


def register(kind: str, name: str) -> Callable[[type], type]:
    """Decorator form of :meth:`Registry.register`: ``@register("environments", "my_env")``.

    For config classes. :mod:`nemorl_rl.registration` has one decorator per kind, which takes functions and classes too.
    """

    def add(target: type) -> type:
        registry().register(kind, name, target)
        return target

    return add
