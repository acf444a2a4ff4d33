"""``nemorl audit verify | show | seal``: reading audit logs. What writes them is in ``nemorl_trust.audit``."""

from __future__ import annotations

import heapq
import os
import re
import time
from datetime import datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import print_list, say
from nemorl_trust.audit.chain import Entry, SealingKey
from nemorl_trust.audit.log import AuditLog
from nemorl_trust.audit.recording import audit_folder, audit_log
from nemorl_trust.audit.verifying import Verdict, entries_of, verify

app = plugin_app(
    help="The log of runs, exports and served calls: is it whole, and what does it say?", no_args_is_help=True
)

Logs = Annotated[
    Path | None,
    typer.Argument(help="A log, or the folder of several. Unset: where this machine keeps them.", show_default=False),
]
AGO = re.compile(r"(\d+)([smhd])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
HEAD = re.compile(r"(\d{1,15}):([0-9a-f]{64})")
DIGITS = 12
"""Of a hash, where a person reads it."""


@app.command("verify")
def verify_logs(
    logs: Logs = None,
    key: Annotated[
        Path | None, typer.Option(help="File with the key that `nemorl audit seal` gave.", show_default=False)
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="NUMBER:HASH of an entry, noted earlier.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every line of audit logs, the chain through them and their ends. Exit 1 if one was changed or cut.

    Without --key, who can write a log could have written all of it anew; with it, nothing from the sealing on.

    Examples:

      nemorl audit verify

      nemorl audit verify /var/log/nemorl/alice.jsonl --key alice.key

      nemorl audit verify --head 41:5f0c… --json
    """
    paths = logs_in(logs)
    if len(paths) > 1 and (key is not None or head is not None):
        raise UsageError(f"--key and --head belong to one log, and here are {len(paths)}", fix="name the log")
    verdicts = [verify(path, key=read_key(key), head=_head(head)) for path in paths]
    if as_json:
        echo_json([verdict.as_dict() for verdict in verdicts], indent=2)
    else:
        for verdict in verdicts:
            _show(verdict)
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def show(
    logs: Logs = None,
    user: Annotated[str | None, typer.Option(help="Entries of this user.", show_default=False)] = None,
    run: Annotated[str | None, typer.Option(help="Of runs whose path contains this.", show_default=False)] = None,
    event: Annotated[str | None, typer.Option(help="Of this event, e.g. run_started.", show_default=False)] = None,
    since: Annotated[
        str | None, typer.Option(help="From then on: 2026-11-22, 2026-11-22T14:00, or 2h, 3d ago.", show_default=False)
    ] = None,
    until: Annotated[str | None, typer.Option(help="Until then, in the same forms.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show entries of audit logs, the oldest first. It does not check them: `nemorl audit verify` does.

    Examples:

      nemorl audit show --since 2d

      nemorl audit show /var/log/nemorl --user alice --event weights_exported --json
    """
    begin, end = moment(since), moment(until)
    kept = (_between(path, begin, end) for path in logs_in(logs))
    found = [
        entry
        for entry in heapq.merge(*kept, key=lambda entry: entry.time)
        if (user is None or entry.user == user)
        and (event is None or entry.event == event)
        and (run is None or run in str(entry.facts.get("run", "")))
    ]
    if as_json:
        echo_json([_as_dict(entry) for entry in found], indent=2)
        return
    times = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time)) for entry in found)
    rows = [(when, entry.user, entry.event, _words(entry.facts)) for when, entry in zip(times, found, strict=True)]
    print_list(("TIME", "USER", "EVENT", "FACTS"), rows)
    if not found:
        say("no entries")


@app.command()
def seal(
    output: Annotated[Path, typer.Argument(help="File to write the key to; take it off this machine.")],
    log: Annotated[Path | None, typer.Option(help="Unset: your own.", show_default=False)] = None,
) -> None:
    """Seal a log from now on, and write the key that verifies it into a file.

    The key is not kept beside the log: what is there are later ones, which follow from it and do not lead back.

    Examples:

      nemorl audit seal audit.key
    """
    chosen = AuditLog(log) if log is not None else audit_log()
    if chosen is None:
        raise UsageError("there is no audit log: NEMORL_AUDIT is off", fix="unset it, or name the log with --log")
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{output} exists", fix="choose another file: a key is never overwritten") from None
    try:
        with os.fdopen(file, "w") as target:
            target.write(chosen.seal().text() + "\n")
    except BaseException:
        output.unlink()
        raise
    say(f"{chosen.path} is sealed from now on; keep {output} on another machine")


def logs_in(place: Path | None) -> list[Path]:
    """The log that a path names, or those in the folder.

    Raises:
        UsageError: There is none.
    """
    place = audit_folder() if place is None else place
    if place is None:
        raise UsageError("there is no audit log: NEMORL_AUDIT is off", fix="name a log, or unset it")
    found = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not found or not found[0].exists():
        raise UsageError(f"no audit log in {place}", fix="name a log (*.jsonl), or the folder of several")
    unreadable = [path for path in found if not os.access(path, os.R_OK)]
    if unreadable:
        raise UsageError(f"{unreadable[0]} is not yours to read", fix="ask who looks after the machine")
    return found


def read_key(path: Path | None) -> SealingKey | None:
    """The key in a file.

    Raises:
        UsageError: It holds none.
    """
    if path is None:
        return None
    key = SealingKey.parse(path.read_text(errors="replace")) if path.is_file() else None
    if key is None:
        raise UsageError(f"{path} holds no key of an audit log", fix="give the file that `nemorl audit seal` wrote")
    return key


def moment(text: str | None) -> float | None:
    """Epoch seconds of a date, a time of day or a span of time before now.

    Raises:
        UsageError: It is none of these.
    """
    if text is None:
        return None
    ago = AGO.fullmatch(text)
    try:
        if ago is not None:
            return time.time() - timedelta(**{UNITS[ago[2]]: int(ago[1])}).total_seconds()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        fix = "write 2026-11-22, 2026-11-22T14:00, or 30m, 2h, 3d"
        raise UsageError(f"{text!r} is no time", fix=fix) from None


def _head(text: str | None) -> tuple[int, str] | None:
    match = HEAD.fullmatch(text) if text is not None else None
    if text is not None and match is None:
        raise UsageError(f"{text!r} is no head of a log", fix="give NUMBER:HASH as `nemorl audit verify` prints it")
    return None if match is None else (int(match[1]), match[2])


def _between(path: Path, begin: float | None, end: float | None) -> list[Entry]:
    """The entries of a log from then to then. An entry came after all before it and before all after it, whatever
    clock it was dated by: one that is dated wrongly is shown rather than left out."""
    entries = [*entries_of(path)]
    latest = [*accumulate((entry.time for entry in entries), max)]
    earliest = [*accumulate((entry.time for entry in reversed(entries)), min)][::-1]
    return [
        entry
        for entry, after, before in zip(entries, latest, earliest, strict=True)
        if (begin is None or after >= begin) and (end is None or before < end)
    ]


def _show(verdict: Verdict) -> None:
    lead = typer.style("ok" if verdict.ok else "changed", fg="green" if verdict.ok else "red", bold=True)
    seals = f", {verdict.sealed} sealed" if verdict.sealed else ""
    seals += f", {verdict.checked} seals verified" if verdict.checked else ""
    say(f" {verdict.path}: {verdict.entries} entries{seals}", lead=lead)
    for problem in (*verdict.problems, *verdict.remarks):
        where = f"line {problem.line} " if problem.line else ""
        say(f"  {where}{problem.what}")
    if verdict.head:
        say(f"  head {verdict.head}")


def _as_dict(entry: Entry) -> dict[str, Any]:
    names = ("n", "time", "host", "user", "uid", "pid", "event", "facts", "hash")
    return {name: getattr(entry, name) for name in names}


def _words(facts: Any) -> str:
    return "  ".join(f"{name}={_short(value)}" for name, value in facts.items())


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} of them"
    text = str(value)
    return text[:DIGITS] if re.fullmatch(r"[0-9a-f]{64}", text) else text
