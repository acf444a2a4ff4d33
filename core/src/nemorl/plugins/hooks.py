"""Lifecycle hooks: pluggy specs, the run-scoped manager and its error policy.

Hooks get summaries and handles, never tensors. The specs are append-only, so old implementations keep working. An
implementation may take any subset of the arguments, by name; others are refused
(:mod:`nemorl.base.packages.hook_signatures`).

Each spec is either *observer* (an implementation that raises is reported once with its plugin id, counted, and
disabled) or *control* (it is re-raised, attributed, and ends the run). A plugin or callback with ``essential = True``
is always treated as control. ``SystemExit`` counts as raising; a person's Ctrl-C does not.

Call order: ``tryfirst``, then the rest, then ``trylast``; within each, the config's ``plugins.hooks``
order, then callbacks in the order given.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from nemorl.base.packages.hook_signatures import Implementation, implementations
from nemorl.base.packages.plugin_policy import HOUSE
from nemorl.base.process.deadlines import deadline
from nemorl.errors import ForeignError, NemorlError, PluginError, boundary
from nemorl.plugins.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from nemorl.plugins.kinds import HookConfig
    from nemorl.trainer import BaseTrainer
    from nemorl.types import Samples

PROJECT = "nemorl"
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a method as an implementation, with its place among others.

>>> class Last:
...     @hookimpl(trylast=True)
...     def on_fit_end(self, trainer): print(trainer.stop_reason)
"""
_spec = pluggy.HookspecMarker(PROJECT)


class HookSpecs:
    """Every lifecycle event. All are observers unless the docstring says *control*.

    >>> class Bell:
    ...     def on_step_end(self, step, metrics): print(step, metrics["loss"])
    """

    @_spec
    def on_build_end(self, trainer: BaseTrainer[Any]) -> None:
        """*Control.* The run's parts exist, and its config is recorded; nothing is restored yet."""

    @_spec
    def on_fit_begin(self, trainer: BaseTrainer[Any]) -> None:
        """*Control.* The run is built and restored; the first step has not begun."""

    @_spec
    def on_epoch_begin(self, trainer: BaseTrainer[Any], epoch: int) -> None:
        """A pass over the data begins; ``epoch`` counts from 0."""

    @_spec
    def on_step_begin(self, trainer: BaseTrainer[Any], step: int) -> None:
        """A step begins; ``step`` counts from 1."""

    @_spec
    def on_rollout_end(self, trainer: BaseTrainer[Any], step: int, samples: Samples) -> None:
        """The step's responses are sampled and scored."""

    @_spec
    def on_weights_synced(self, trainer: BaseTrainer[Any], step: int, version: int) -> None:
        """The generator holds the weights of ``version``."""

    @_spec
    def on_weights_proven(self, trainer: BaseTrainer[Any], step: int, receipt: Mapping[str, Any]) -> None:
        """A receipt came for the weights of a sync: its facts as plain data, whether or not it proves them."""

    @_spec
    def on_step_end(self, trainer: BaseTrainer[Any], step: int, metrics: Mapping[str, float]) -> None:
        """A step is complete, its metrics final."""

    @_spec
    def on_log(self, trainer: BaseTrainer[Any], step: int, metrics: dict[str, float]) -> None:
        """Metrics are about to be logged under their full names (``train/reward``, …); numbers added go too."""

    @_spec
    def on_validation_end(self, trainer: BaseTrainer[Any], step: int, metrics: Mapping[str, float]) -> None:
        """A validation is complete."""

    @_spec
    def on_checkpoint_saved(self, trainer: BaseTrainer[Any], step: int, path: Path) -> None:
        """A checkpoint exists, verified, at ``path``."""

    @_spec
    def on_epoch_end(self, trainer: BaseTrainer[Any], epoch: int, metrics: Mapping[str, float]) -> None:
        """A pass over the data ended; ``metrics`` are those of its last step, and the latest of all by full name."""

    @_spec
    def on_exception(self, trainer: BaseTrainer[Any], error: BaseException) -> None:
        """The run is ending because of ``error``."""

    @_spec
    def on_fit_end(self, trainer: BaseTrainer[Any], metrics: Mapping[str, float]) -> None:
        """The run reached its end or was asked to stop, and is saved; ``metrics`` are the final ones."""


EVENTS = tuple(name for name in vars(HookSpecs) if name.startswith("on_"))
CONTROL = frozenset({"on_build_end", "on_fit_begin"})
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    event: tuple(name for name in inspect.signature(getattr(HookSpecs, event)).parameters if name != "self")
    for event in EVENTS
}
"""Arguments of each event, in their order."""


class Hooks:
    """The hook manager of one run. ``hooks.fire("on_step_end", trainer=…, step=…, metrics=…)``."""

    def __init__(self, report: Callable[[str], None], *, limit_s: float = math.inf) -> None:
        """
        Args:
            report: Told of what went wrong in a hook.
            limit_s: Longest time of one call.
        """
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        self._report = report
        self._limit_s = limit_s
        self.failures: dict[str, int] = {}
        """Plugin id -> how often it raised."""

    def register(self, plugin: object, name: str) -> None:
        """Add an object whose ``on_*`` methods are hook implementations.

        Raises:
            PluginError: a method has an unknown name or a wrong signature (shows the right one), or the name is taken.
        """
        if self._manager.has_plugin(name):
            raise PluginError(f"hook plugin {name!r} is there twice", fix="list it once in plugins.hooks")
        guarded = types.SimpleNamespace()
        for found in implementations(plugin, name, ARGUMENTS):
            is_essential = found.event in CONTROL or bool(getattr(plugin, "essential", False))
            guard = _Guard(found, name, is_essential, self.failures, self._report, self._limit_s)
            marked = hookimpl(guard.as_the_event(), tryfirst=found.goes_first, trylast=found.goes_last)
            setattr(guarded, found.event, marked)
        # pluggy calls the most recently registered first; callers register in reverse of the wanted order.
        self._manager.register(guarded, name=name)

    def fire(self, event: str, **arguments: Any) -> None:
        getattr(self._manager.hook, event)(**arguments)


@dataclass(frozen=True, slots=True)
class _Guard:
    """One implementation under the error policy of its event."""

    found: Implementation
    name: str
    is_essential: bool
    failures: dict[str, int]
    """Of the whole run; shared by all guards."""
    report: Callable[[str], None]
    limit_s: float

    def as_the_event(self) -> Callable[..., None]:
        """pluggy passes what a signature names, but nothing that has a default: this shows it the event's own."""

        @functools.wraps(getattr(HookSpecs, self.found.event))
        def call(*values: Any) -> None:
            offered = zip(ARGUMENTS[self.found.event], values, strict=True)
            self._attempt({argument: value for argument, value in offered if argument in self.found.arguments})

        return call

    def _attempt(self, arguments: Mapping[str, Any]) -> None:
        """Call the hook. A failure is raised if it is essential, else reported once."""
        if self.name in self.failures and not self.is_essential:
            return
        where = f"hook {self.found.event} of {self.name}"
        try:
            with boundary(where), deadline(where, self.limit_s, setting="plugins.hook_timeout_s"):
                self.found.method(**arguments)
        except NemorlError as error:
            self.failures[self.name] = self.failures.get(self.name, 0) + 1
            if self.is_essential and self.found.event != "on_exception":
                raise
            what = error.message if isinstance(error, ForeignError) else f"{where}: {error.message}"
            self.report(what if self.is_essential else f"{what}; it is disabled for the rest of this run")


def build_hooks(
    registry: Registry,
    enabled: Iterable[HookConfig],
    callbacks: Iterable[object],
    report: Callable[[str], None],
    *,
    limit_s: float = math.inf,
    build_limit_s: float = math.inf,
) -> Hooks:
    """The manager of a run: hook plugins in the config's order, those of the toolkits, then the user's callbacks."""
    hooks = Hooks(report, limit_s=limit_s)
    ordered: list[tuple[str, object]] = []
    configs = list(enabled)
    for entry in registry.index.of_kind("hooks"):
        own = registry.load("hooks", entry.id) if entry.distribution in HOUSE else None
        if own is not None and own not in map(type, configs):  # a run may list it, for its options or its place
            configs.append(own())
    for config in configs:
        identity = registry.index.find("hooks", registry.name_of("hooks", type(config))).id
        ordered.append((identity, _built(config, identity, build_limit_s)))
    for number, callback in enumerate(callbacks):
        kind = callback if isinstance(callback, type) else type(callback)
        ordered.append((f"callback {number} ({kind.__name__})", callback))
    for name, plugin in reversed(ordered):
        hooks.register(plugin, name)
    return hooks


def _built(config: HookConfig, name: str, limit_s: float) -> object:
    what = f"hook plugin {name!r} could not be built"
    fix = "check its options; to run without it, remove it from plugins.hooks"
    try:
        with boundary(what), deadline(f"building hook {name}", limit_s, setting="plugins.build_timeout_s"):
            return config.build()
    except ForeignError as error:
        raise PluginError(f"{what}: {type(error.__cause__).__name__}: {error.__cause__}", fix=fix) from error.__cause__
    except NemorlError as error:
        raise PluginError(f"{what}: {error.message}", fix=error.fix or fix) from error
