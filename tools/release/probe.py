"""Runs in an environment that wheels were installed into, with its Python, and needs nothing: loads all they offer.

    python -I probe.py

Prints JSON: ``distributions`` of nemorl, how many ``entry_points`` loaded, ``wrong``: what did not, or came from
elsewhere, and all ``packages`` with their versions.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib.metadata import EntryPoint, distributions
from importlib.resources import files

BY_OTHERS = {"pytest11"}
"""Groups that only a program of others loads, which thereby is installed."""
FILES = {"nemorl.templates"}
"""Groups whose entries name a file of a package, not an object."""


def probe() -> dict[str, object]:
    """Every entry point of nemorl's distributions, loaded: commands, plugins, names, slots."""
    everything = sorted(distributions(), key=lambda found: found.name)
    ours = [found for found in everything if found.name == "nemorl" or found.name.startswith("nemorl-")]
    loaded, wrong = 0, []
    for distribution in ours:
        for entry in (found for found in distribution.entry_points if found.group not in BY_OTHERS):
            try:
                _load(entry)
                loaded += 1
            except BaseException:  # of any kind: it is told, and the next one tried
                wrong.append(f"{distribution.name}: {entry.group} {entry.name}: {traceback.format_exc(limit=-3)}")
    places = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("nemorl")}
    wrong += [f"{name} is at {at}" for name, at in places.items() if at and not at.startswith(sys.prefix)]
    return {
        "distributions": [found.name for found in ours],
        "entry_points": loaded,
        "wrong": wrong,
        "packages": [(found.name, found.version) for found in everything],
    }


def _load(entry: EntryPoint) -> None:
    if entry.group not in FILES:
        entry.load()
    elif not files(entry.module).joinpath(entry.attr).read_bytes():
        raise FileNotFoundError(f"{entry.value} is empty")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
