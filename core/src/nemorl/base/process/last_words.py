"""Notes of a process to its supervisor, which can speak when the process no longer can.

The supervisor (:mod:`nemorl_cli.supervisor`) and the process share one open file, named with the process's own id
in the environment: children inherit the variable, but their id is another. Without a supervisor, which
`train`, `eval` and `quickstart` alone have, nothing is written.
"""

from __future__ import annotations

import os

VARIABLE = "NEMORL_SUPERVISOR"
MARK = b"\x1enemorl "
"""The beginning of a line of notes. Other lines of the file come from :mod:`faulthandler`."""


def note(**facts: object) -> None:
    """One line for the supervisor. May be called anywhere, signal handlers included, and never raises."""
    descriptor = supervised_file()
    if descriptor is None:
        return
    import json

    try:
        os.write(descriptor, MARK + json.dumps(facts, default=str).encode() + b"\n")
    except OSError:
        return


def supervised_file() -> int | None:
    """Descriptor of the file that the supervisor reads; ``None``: this process has no supervisor."""
    descriptor, _, process = os.environ.get(VARIABLE, "").partition(":")
    return int(descriptor) if process == str(os.getpid()) else None
