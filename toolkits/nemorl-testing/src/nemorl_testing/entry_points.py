"""The check of every plugin of every kind: it is found and can be loaded."""

from __future__ import annotations

from nemorl.plugins import registry
from nemorl_trust.source import diagnose

from nemorl_testing.kit import Subject, expect


def check_entry_point_is_usable(subject: Subject) -> None:
    """The entry point is listed as ``ok``, loads, and is what its kind asks for. (DESIGN 4)"""
    entry = subject.entry
    expect(entry.status == "ok", f"{entry.id} is {entry.status}: {entry.diagnostics}")
    stop = diagnose(entry, registry())
    # What `build` needs may be absent here; checks that build say so.
    expect(stop is None or stop.state == "missing", f"{entry.id} is {stop and stop.state}: {stop and stop.message}")
