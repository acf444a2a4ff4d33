"""The guard of processes that must not outlive a driver, a script of its own: should it die, they are ended.

Ray's daemons notice a dead driver by themselves, but take up to a minute, and leave their folder. Run as
``python process_guard.py DRIVER FOLDER``: the process id to watch, and a folder, whose name every guarded process
carries in its environment. The folder is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "NEMORL_PRIVATE_RAY"
"""Environment variable of guarded processes: their folder."""
POLL_S = 0.5
ROUNDS = 10
"""Times to look for guarded processes: one may start another while it is being ended."""


def main(driver: int, folder: Path) -> None:
    while os.getppid() == driver:
        time.sleep(POLL_S)
    end(folder)


def end(folder: Path) -> None:
    """End the guarded processes, and remove their folder."""
    for _ in range(ROUNDS):
        left = processes(folder)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not left:
            break
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def processes(folder: Path) -> list[int]:
    """Living processes that carry a folder's name. Linux only: elsewhere, none are found."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
