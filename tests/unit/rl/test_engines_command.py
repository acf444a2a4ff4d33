"""``nemorl engines`` of a run with engines of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_yard import WAIT_S, Yard
from nemorl_agents.servers import command
from nemorl_rl.placement.fleet_keeper import FleetKeeper
from nemorl_rl.placement.fleet_orders import FOLDER, state_of

Command = Any


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run with one engine and a device for another one."""
    yard = Yard(2)
    fleet = yard.fleet(1)
    FleetKeeper(fleet, tmp_path / FOLDER, lambda: {"backend": "generation backend Yard", "weights": 7})
    yield tmp_path
    fleet.shutdown()


def await_engines(run: Path, *names: str) -> None:
    waiting = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        engines = (state_of(run) or {})["engines"]
        if [engine["name"] for engine in engines if engine["state"] == "ready"] == [*names]:
            return
        waiting.wait(0.05)
    raise AssertionError(state_of(run))


def test_engines_are_listed_added_and_dropped(run: Path, nemorl: Command) -> None:
    added = nemorl("engines", "add", str(run), "--count", "1")
    assert (added.code, "engine-1" in added.out + added.err) == (0, True)
    await_engines(run, "engine-0", "engine-1")
    listed = json.loads(nemorl("engines", "list", str(run), "--json").out)
    assert [(one["name"], one["state"], one["lost"]) for one in listed["engines"]] == [
        ("engine-0", "ready", 0),
        ("engine-1", "ready", 0),
    ]
    assert (listed["weights"], listed["is_over"]) == (7, False)
    shown = nemorl("engines", "list", str(run)).out
    assert all(word in shown for word in ("name", "in_progress", "engine-0", "engine-1", "ready"))
    dropped = nemorl("engines", "drop", str(run), "engine-0", "--json")
    assert json.loads(dropped.out) == {"dropped": ["engine-0"]}
    await_engines(run, "engine-1")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("add", "--count", "2"), "1 of 2"),  # there is one device
        (("add",), "--count"),
        (("add", "https://node9:8000", "--count", "1"), "not both"),
        (("add", "--count", "0"), "1"),
        (("drop", "engine-0"), "only"),
        (("drop", "engine-4"), "engine-0"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_with_a_reason(
    run: Path, nemorl: Command, arguments: tuple[str, ...], word: str
) -> None:
    verb, *rest = arguments
    done = nemorl("engines", verb, str(run), *rest)
    assert (done.code, word in done.err) == (2, True), done.err
    await_engines(run, "engine-0")


def test_a_run_without_such_engines_and_one_that_has_ended_say_so(
    tmp_path: Path, run: Path, nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = nemorl("engines", "add", str(tmp_path / "other"), "--count", "1")
    assert (none.code, "colocated" in none.err) == (2, True)
    state = run / FOLDER / "state.json"
    ended = tmp_path / "ended" / FOLDER
    ended.mkdir(parents=True)
    (ended / "state.json").write_text(json.dumps({**json.loads(state.read_text()), "is_over": True, "engines": []}))
    over = nemorl("engines", "drop", str(tmp_path / "ended"), "engine-0")
    assert (over.code, "ended" in over.err) == (2, True)
    assert "ended" in nemorl("engines", "list", str(tmp_path / "ended")).out
    # One that was killed cannot say so: nobody answers.
    monkeypatch.setattr(command, "ANSWER_S", 0.3)
    (ended / "state.json").write_text(state.read_text())
    silent = nemorl("engines", "drop", str(tmp_path / "ended"), "engine-0")
    assert silent.code != 0
    assert "0.3" in silent.err
