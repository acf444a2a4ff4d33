"""``nemorl doctor --clean``: what killed runs left on this machine, shown and then removed."""

from __future__ import annotations

import sys
import time
from typing import Any

import typer
from nemorl.errors import UsageError
from nemorl_cli.answers import echo_json
from nemorl_cli.terminal import print_table, say

from nemorl_insight.doctor.left_folders import LeftFolder, left_folders, usual_places

MIB = 2**20


def clean_up(*, yes: bool, as_json: bool) -> None:
    """Show what is left over, and remove it with a person's consent.

    Args:
        yes: Do not ask.
        as_json: Print one object; without ``yes`` nothing is removed then.

    Raises:
        UsageError: Nobody can be asked.
    """
    found = left_folders(usual_places())
    if as_json:
        removed = [left.remove() for left in found] if yes else [False] * len(found)
        answer = [{**_as_dict(left), "removed": gone} for left, gone in zip(found, removed, strict=True)]
        echo_json({"left_overs": answer}, indent=2)
    elif not found:
        say("nothing is left over here")
        return
    else:
        _show(found)
        _ask(len(found), yes=yes)
        removed = [left.remove() for left in found]
        say(f"removed {sum(removed)} of {len(found)}")
    if yes and not all(removed):
        raise typer.Exit(1)


def _show(found: list[LeftFolder]) -> None:
    rows = []
    for left in found:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(left.owner.since))
        processes = ", ".join(map(str, left.processes)) or "none"
        rows.append((left.folder, f"{left.bytes / MIB:.1f} MiB", f"{left.owner.pid}, {since}", processes))
    print_table(("FOLDER", "SIZE", "MADE BY PROCESS", "ITS PROCESSES"), rows, whole=("FOLDER",))


def _ask(count: int, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("nothing was removed: it needs a yes, and no terminal can be asked", fix="add --yes")
    typer.confirm(f"end these processes and remove {count} folders?", abort=True)


def _as_dict(left: LeftFolder) -> dict[str, Any]:
    owner = {"pid": left.owner.pid, "host": left.owner.host, "since": left.owner.since}
    return {"folder": str(left.folder), "bytes": left.bytes, "owner": owner, "processes": [*left.processes]}
