"""Files by which ``nemorl engines`` talks to a run that is on: what it asks for, the answers, how each engine is doing.

An order is a file that the run removes once it has written the answer beside it. All are replaced as a whole.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import listed, loading, remove, replace_text, storing
from nemorl.errors import DataError, DeadlineError, NemorlError, UsageError

FOLDER = Path("scratch") / "fleet"
"""Below a run's directory."""
MOST_ADDED = 1024
"""Engines of one order."""
LOOK_S = 0.2
"""How often whoever waits for an answer looks."""


class Orders:
    """The run's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said: Mapping[str, Any] | None = None
        remove(folder)  # of a run that was killed: nobody waits for an answer any more
        with storing(folder):
            folder.mkdir(parents=True)

    def serve(self, add: Callable[[int], Sequence[str]], drop: Callable[[str], None]) -> None:
        """Carry out what was asked for since the last time.

        Args:
            add: Starts so many engines, whose names it returns.
            drop: Lets the one of this name leave.
        """
        for path in listed(self._folder, "*.order"):
            try:
                names = list(_carried_out(_read(path), add, drop))
                answer: dict[str, Any] = {"names": names}
            except NemorlError as error:
                answer = {"error": error.message, "fix": error.fix}
            replace_text(path.with_suffix(".answer"), json.dumps(answer))
            remove(path)

    def report(self, state: Mapping[str, Any]) -> None:
        """Say how the engines are doing."""
        if state != self._said:
            replace_text(self._folder / "state.json", json.dumps(state, indent=2) + "\n")
            self._said = state


def _carried_out(order: Mapping[str, Any], add: Callable[[int], Sequence[str]], drop: Callable[[str], None]) -> Any:
    size, name = order.get("add"), order.get("drop")
    if type(size) is int and 1 <= size <= MOST_ADDED:
        return add(size)
    if isinstance(name, str):
        drop(name)
        return [name]
    raise UsageError("this is no order that a run knows", fix="use the same version of nemorl as the run")


def state_of(run: Path) -> dict[str, Any] | None:
    """What the run said last of its engines; ``None``: it has none that come and go, or has not begun."""
    path = run / FOLDER / "state.json"
    return _read(path) if path.is_file() else None


def ask(run: Path, order: Mapping[str, Any], wait_s: float) -> list[str]:
    """The names of the engines that an order is about, once the run has carried it out.

    Args:
        run: Directory of the run.
        order: ``{"add": count}`` or ``{"drop": name}``.
        wait_s: Longest wait for the answer.

    Raises:
        UsageError: The run refuses; says why.
        DeadlineError: It does not answer.
    """
    path = run / FOLDER / f"{uuid.uuid4().hex}.order"
    answer, end = path.with_suffix(".answer"), time.monotonic() + wait_s
    with storing(path):
        replace_text(path, json.dumps(order))
    try:
        while not answer.is_file():
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{run} did not answer within {wait_s:g} s",
                    fix="look whether it is on (`nemorl runs`): the engines of a run that has ended are gone",
                )
            time.sleep(LOOK_S)
        found = _read(answer)
    finally:
        remove(path)
        remove(answer)
    if "error" in found:
        raise UsageError(str(found["error"]), fix=found.get("fix"))
    return [str(name) for name in found.get("names", ())]


def _read(path: Path) -> dict[str, Any]:
    try:
        with loading(path):
            found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", fix="remove it") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged: it holds no object", fix="remove it")
    return found
