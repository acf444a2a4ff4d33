"""Additions to runs as server-sent events. The id of each event is how far every run was read: a browser that comes
back with it (``Last-Event-ID``) gets what was added since, each line once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import anyio
from anyio.to_thread import run_sync
from nemorl_cli.following import lines_after

from nemorl_insight.view.watched import Position, WatchedRun

POLL_S = 1.0
"""Seconds between two looks at the files."""
QUIET_S = 15.0
"""Seconds of silence after which a comment is sent, so that nobody in between closes the connection."""


def positions_of(text: str, runs: Sequence[WatchedRun]) -> list[Position]:
    """Of each run, from the id of an event. What is no id, or of other runs, means the present.

    Example:
        >>> positions_of("", [])
        []
    """
    given = [Position.parse(part) for part in text.split("_")] if text else []
    if len(given) != len(runs) or None in given:
        return [run.position for run in runs]
    return [position for position in given if position is not None]


def written(positions: Sequence[Position]) -> str:
    """The id of an event."""
    return "_".join(map(str, positions))


async def events(
    runs: Sequence[WatchedRun], positions: Sequence[Position], is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Events from these positions on, until it is over.

    Args:
        runs: To follow.
        positions: How far the client has read each.
        is_over: The server ends.
    """
    now, quiet_s = list(positions), 0.0
    yield b"retry: 2000\n\n"
    while not is_over():
        found = False
        for number, run in enumerate(runs):
            added = await run_sync(lambda run=run, at=now[number]: list(added_to(run, at)))  # type: ignore[misc]
            for message, now[number] in added:
                found = True
                yield event({"run": number, **message}, written(now))
        quiet_s = 0.0 if found else quiet_s + POLL_S
        if quiet_s >= QUIET_S:
            quiet_s = 0.0
            yield b": quiet\n\n"
        await anyio.sleep(0 if found else POLL_S)


def event(message: dict[str, Any], number: str) -> bytes:
    """One event in the format of the stream: JSON has no line breaks of its own."""
    return f"id: {number}\ndata: {json.dumps(message)}\n\n".encode()


def added_to(run: WatchedRun, at: Position) -> Iterator[tuple[dict[str, Any], Position]]:
    """Contents of a run beyond a position, piece by piece, with the position after each."""
    for name in ("metrics", "events"):
        offset = getattr(at, name)
        lines, stop = lines_after(run.path / f"{name}.jsonl", offset)
        if stop != offset:
            at = replace(at, **{name: stop})
            yield ({"kind": name, "lines": lines} if stop > offset else {"kind": "again"}), at
    changes = run.position.records
    if changes != at.records:
        at = replace(at, records=changes)
        yield {"kind": "records"}, at
