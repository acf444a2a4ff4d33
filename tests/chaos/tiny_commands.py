"""The commands that meet faults: as a terminal would call them, on what one tiny run left."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_runs
from faulty_files import Fault, arm


def prepared(commands: Sequence[Sequence[str]], **run: str) -> int:
    """A whole run, and each command once: all that they import is warm then."""
    status = tiny_runs.train(**run)
    for arguments in commands:
        status = status or command(arguments, folder=str(Path(run["run_dir"]).parent), trace=run["trace"])
    return status


def command(arguments: Sequence[str], folder: str, trace: str, fault: dict[str, Any] | None = None) -> int:
    """One ``nemorl`` command; a file operation below ``folder`` fails.

    Returns:
        Its exit status.
    """
    from nemorl_cli.app import main

    sys.argv = ["nemorl", *arguments]
    arm(Path(folder), Fault(**fault) if fault else None, Path(trace))
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0
