"""Checks of hook plugins: they implement events that exist, with arguments that exist."""

from __future__ import annotations

import inspect
from typing import Any

from nemorl.plugins import registry
from nemorl.plugins.hooks import EVENTS, Hooks, HookSpecs
from nemorl.testing.kit import Subject, expect


def check_entry_point_is_usable(subject: Subject) -> None:
    """The entry point is listed as ``ok`` and loads. (DESIGN 4)"""
    entry = subject.entry
    expect(entry.status == "ok", f"{entry.id} is {entry.status}: {entry.diagnostics}")
    stop = registry().diagnose(entry)
    expect(stop is None, f"{entry.id} is {stop and stop.state}: {stop and stop.message}")


def check_every_method_is_an_event(subject: Subject) -> None:
    """Each ``on_*`` method is an event that nemorl fires, and there is at least one. (DESIGN 4)"""
    methods = _methods(subject)
    expect(methods, "there is no on_* method, so nothing is ever called")
    unknown = sorted(set(methods) - set(EVENTS))
    expect(not unknown, f"nemorl never calls {', '.join(unknown)}; the events are {', '.join(EVENTS)}")


def check_every_argument_is_the_events(subject: Subject) -> None:
    """A method takes any of its event's arguments, by name, and no other without a default. (DESIGN 4)"""
    for event, method in _methods(subject).items():
        if event not in EVENTS:
            continue
        offered = set(inspect.signature(getattr(HookSpecs, event)).parameters) - {"self"}
        for name, parameter in inspect.signature(method).parameters.items():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            known = is_named and (name in offered or parameter.default is not parameter.empty)
            expect(known, f"{event} takes {parameter}, but is given {', '.join(sorted(offered))}")


def check_manager_accepts_it(subject: Subject) -> None:
    """The run's hook manager registers the plugin; ``essential`` is a bool. (DESIGN 4)"""
    plugin = _plugin(subject)
    Hooks(lambda text: None).register(plugin, subject.name)
    essential = getattr(plugin, "essential", False)
    expect(isinstance(essential, bool), f"essential = {essential!r}")


def _plugin(subject: Subject) -> Any:
    loaded = registry().load("hooks", subject.name)
    return loaded() if isinstance(loaded, type) else loaded


def _methods(subject: Subject) -> dict[str, Any]:
    plugin = _plugin(subject)
    return {name: getattr(plugin, name) for name in dir(plugin) if name.startswith("on_")}
