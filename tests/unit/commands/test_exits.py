"""However a run ends: an exit code that is not 0, and one error line; where Python can tell, an event as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deaths import PLACES, UNCATCHABLE, WAYS
from tiers import in_full

DEATHS = [
    *(f"{PLACES[number % len(PLACES)]}: {way}" for number, way in enumerate([*WAYS, *in_full([*WAYS])])),
    *(f"{place}: exit" for place in in_full([*PLACES])),
]
"""Every way to die, each in a place of its own; at length in two places, and ``sys.exit(0)`` in all."""
OWNERS = {
    "import": "algorithm 'death' from acme-death 1.0",
    "problems": "problems() of Env (acme_death)",
    "build": "environment Env",
    "dataset": "dataset Data",
    "rows": "dataset Data",
    "reward": "environment 'environment' (acme_death.Judge)",
    "loss": "loss Deadly (acme_trainer)",
    "train_step": "algorithm death",
    "hook": "hook on_step_end of acme-death:death",
    "logger": "logger Log",
    "closing": "closing Log",
    "section": "report section acme-death:death",
}
CODES = {"leave": 70, "segfault": 128 + 11, "kill": 128 + 9}
BEFORE_A_RUN = ("import", "problems")
"""While the config loads there is no run yet, hence no event."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="commands are supervised on Linux only"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each death: all are tried by one process, which imports torch once."""
    command = [sys.executable, str(Path(__file__).with_name("deaths.py")), str(tmp_path_factory.mktemp("deaths"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "nowhere: exit", *DEATHS], capture_output=True, text=True, check=False, timeout=570, env=environment
    )
    assert done.returncode == 0, done.stderr
    ends: dict[str, Any] = json.loads(done.stdout)
    return ends


def test_a_run_in_which_nothing_dies_exits_0_without_an_error(found: dict[str, Any]) -> None:
    end = found["nowhere: exit"]
    assert (end["code"], [event["event"] for event in end["events"]]) == (
        0,
        ["started", "weight_receipt", "checkpoint", "finished"],
    )
    assert "error" not in end["stderr"]


@pytest.mark.parametrize("death", DEATHS)
def test_no_death_is_taken_for_success_or_goes_unexplained(found: dict[str, Any], death: str) -> None:
    end, (place, _, way) = found[death], death.partition(": ")
    assert end["code"] == CODES.get(way, 2)
    said = [line for line in end["stderr"].splitlines() if line.startswith("error: ")]
    assert len(said) == 1, end["stderr"]
    assert "Traceback" not in end["stderr"]
    explained = end["stderr"].partition("error: ")[2]
    if way not in UNCATCHABLE:
        assert OWNERS[place] in explained
    elif way == "segfault":  # the others leave no stack
        assert "acme_death.py, line " in explained
    if place not in BEFORE_A_RUN and way not in UNCATCHABLE:
        last = end["events"][-1]
        assert last["event"] == "failed"
        assert explained.splitlines()[0] in last["error"]
