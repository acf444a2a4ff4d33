"""Processes that race for folders, one after the other: ``python racing.py FOLDER``. Small: forks of it cost little.

With ``--no-flock`` as on a network file system without locks. Prints a JSON list: of each folder the exit codes of the
losers, how the winner ended, and what winners wrote.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from nemorl.base.files.ownership import Ownership
from nemorl.errors import RunInUseError

ROUNDS, RACERS = 10, 6
LOST = 2


def race(folder: Path) -> dict[str, Any]:
    """Of processes that all ask at once for a folder, which the winner leaves by being killed."""
    start, go = os.pipe()
    pids = [os.fork() or attempt(folder, start, go) for _ in range(RACERS)]
    os.close(go)
    os.close(start)
    ended = dict(os.wait() for _ in range(RACERS - 1))
    (winner,) = set(pids) - ended.keys()
    winners = folder / "winners"
    while not (winners.exists() and winners.read_text()):  # the others may be told before it has written
        assert os.waitpid(winner, os.WNOHANG) == (0, 0)
    os.kill(winner, signal.SIGKILL)
    _, status = os.waitpid(winner, 0)
    Ownership(folder).close()  # a dead owner hinders nobody
    codes = [os.waitstatus_to_exitcode(code) for code in ended.values()]
    return {"losers": codes, "winner": os.waitstatus_to_exitcode(status), "winners": winners.read_text()}


def attempt(folder: Path, start: int, go: int) -> int:
    """What a racer does. It does not return."""
    code = 99
    try:
        os.close(go)
        os.read(start, 1)  # returns in all of them at once, when the parent closes its end
        try:
            kept = Ownership(folder)
        except RunInUseError:
            code = LOST
        else:
            with (folder / "winners").open("a") as file:
                file.write("one\n")
            signal.pause()
            kept.close()
    finally:
        os._exit(code)


def no_flock(*_: Any) -> None:
    raise OSError(errno.ENOTSUP, "Operation not supported")


def main(top: Path, *options: str) -> None:
    if "--no-flock" in options:
        fcntl.flock = no_flock
    folders = [top / str(number) for number in range(ROUNDS)]
    for folder in folders:
        folder.mkdir()
    print(json.dumps([race(folder) for folder in folders]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
