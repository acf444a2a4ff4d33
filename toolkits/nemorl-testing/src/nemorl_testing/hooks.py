"""Checks of hook plugins: the run's hook manager takes them, and something of theirs is called."""

from __future__ import annotations

from typing import Any

from nemorl.plugins.hooks import EVENTS, Hooks

from nemorl_testing.kit import Subject, expect


def check_it_answers_an_event(subject: Subject) -> None:
    """There is at least one ``on_*`` method: without any, nothing is ever called. (DESIGN 4)"""
    methods = [name for name in dir(_plugin(subject)) if name.startswith("on_")]
    expect(methods, f"there is no on_* method; the events are {', '.join(EVENTS)}")


def check_manager_accepts_it(subject: Subject) -> None:
    """Each ``on_*`` method is an event that nemorl fires, and takes arguments of this event, by name. (DESIGN 4)"""
    Hooks(lambda text: None).register(_plugin(subject), subject.name)


def check_essential_is_a_bool(subject: Subject) -> None:
    """``essential`` says whether its failure ends the run: True or False, and nothing else. (DESIGN 4)"""
    essential = getattr(_plugin(subject), "essential", False)
    expect(isinstance(essential, bool), f"essential = {essential!r}")


def _plugin(subject: Subject) -> Any:
    subject.require_modules()
    return subject.config.build()
