"""Checks of a hook method's signature, made when it is registered. Nothing here calls a hook.

An implementation is a plain function that takes any of its event's arguments by name. What pluggy would accept and
then call wrongly, or never, is refused: a generator that nobody advances, a coroutine that nobody awaits, an argument
whose default would hide the real value. So are pluggy's wrappers, which run around other implementations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.errors import PluginError

MARK = "nemorl_impl"
"""Attribute in which ``hookimpl`` keeps its options."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One method of one hook object, known to be callable as its event promises."""

    event: str
    method: Callable[..., Any]
    arguments: frozenset[str]
    """Those of the event's arguments that it takes."""
    goes_first: bool
    """``tryfirst=True``"""
    goes_last: bool
    """``trylast=True``"""


def implementations(plugin: object, name: str, events: Mapping[str, Sequence[str]]) -> list[Implementation]:
    """The hook methods of an object.

    Args:
        plugin: An instance, a class or a module.
        name: What messages call it.
        events: Every event with its arguments, in their order.

    Raises:
        PluginError: a method has an unknown name, or cannot be called with its event's arguments; shows the right
            signature.
    """
    marks = {attribute: _mark(plugin, attribute) for attribute in dir(plugin)}
    wanted = [
        attribute
        for attribute, mark in marks.items()
        if (attribute.startswith("on_") or mark is not None) and not _may_be_absent(attribute, mark, events)
    ]
    unknown = [attribute for attribute in wanted if attribute not in events]
    if unknown:
        raise PluginError(
            f"hook plugin {name!r} defines {', '.join(unknown)}, which nemorl never calls",
            fix=f"the events are {', '.join(events)}",
        )
    return [_checked(plugin, name, event, events[event], marks[event] or {}) for event in wanted]


def signature(event: str, arguments: Sequence[str]) -> str:
    """``on_step_begin(trainer, step)``"""
    return f"{event}({', '.join(arguments)})"


def _mark(plugin: object, attribute: str) -> Mapping[str, Any] | None:
    # Without the descriptor protocol, so that properties stay unread. The mark of a static or class method is on the
    # descriptor or on the function in it, whichever decorator came first.
    found = inspect.getattr_static(plugin, attribute, None)
    places = (found, found.__func__) if isinstance(found, (staticmethod, classmethod)) else (found,)
    for place in places:
        mark = getattr(place, MARK, None)
        if isinstance(mark, Mapping):
            return mark
    return None


def _may_be_absent(attribute: str, mark: Mapping[str, Any] | None, events: Mapping[str, Sequence[str]]) -> bool:
    """``optionalhook=True``: an event of a later nemorl, which this one does not have."""
    return attribute not in events and bool((mark or {}).get("optionalhook"))


def _checked(
    plugin: object, name: str, event: str, arguments: Sequence[str], mark: Mapping[str, Any]
) -> Implementation:
    right = signature(event, arguments)
    method = getattr(plugin, event)
    refusal = _wrong_kind(method, mark) or _wrong_parameters(plugin, method, arguments)
    if refusal is not None:
        what, fix = refusal
        raise PluginError(f"hook plugin {name!r}: {event} {what}", fix=f"{fix}; the event is {right}")
    taken = frozenset(inspect.signature(method).parameters) & frozenset(arguments)
    return Implementation(event, method, taken, bool(mark.get("tryfirst")), bool(mark.get("trylast")))


def _wrong_kind(method: Any, mark: Mapping[str, Any]) -> tuple[str, str] | None:
    """The error of a hook that is not a callable function: its actual kind, and the fix."""
    if not callable(method):
        return f"is {method!r}, which cannot be called", "make it a method"
    body = method if inspect.isroutine(method) or isinstance(method, functools.partial) else method.__call__
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        return "is async, and hooks are called from a loop that awaits nothing", "use def, and asyncio.run inside it"
    if mark.get("wrapper") or mark.get("hookwrapper") or inspect.isgeneratorfunction(body):
        return (
            "is a generator or marked as a wrapper, and nemorl runs no hook around others",
            "remove the mark and the yield; what has to run before and after the others goes into two hook objects, "
            "marked hookimpl(tryfirst=True) and hookimpl(trylast=True)",
        )
    if mark.get("specname"):
        return f"is marked specname={mark['specname']!r}", "give the method the name of its event"
    return None


def _wrong_parameters(plugin: object, method: Callable[..., Any], arguments: Sequence[str]) -> tuple[str, str] | None:
    """The first parameter that cannot be given, and how to fix it."""
    by_name = "take its arguments by name, any of them in any order"
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError) as error:
        return f"has no signature that can be read ({error})", "make it a Python function"
    for parameter in parameters.values():
        if isinstance(plugin, type) and parameter.name == "self":
            return "needs an object, and this is its class", f"pass {plugin.__name__}()"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            return f"takes {stars}{parameter.name}, which hides what it uses", by_name
        if parameter.kind is parameter.POSITIONAL_ONLY:
            return f"takes {parameter.name} by position only", f"remove the /; {by_name}"
        if parameter.name not in arguments and parameter.default is parameter.empty:
            return f"takes {parameter.name!r}, which the event does not have", by_name
    return None
