"""What is run in an environment with other versions: imports, the plugins' list, doctor, conformance checks.

What fails there is run in the present environment too: a fault of both is not the other version's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from nemorl.plugins import PluginEntry
from nemorl.plugins.index import singular

from nemorl_insight.doctor.upgrades.overlays import Overlay, variables
from nemorl_insight.doctor.upgrades.processes import Done, run_limited

Outcome = Literal["passed", "failed", "failed in both", "skipped"]


@dataclass(frozen=True)
class Trial:
    """One thing that was run."""

    name: str
    outcome: Outcome
    seconds: float
    error: str = ""
    """Its first line of error, or why it was skipped."""
    log: str = ""
    """The end of what it said."""


@dataclass(frozen=True)
class Side:
    """The present environment, or one with other versions."""

    overlay: Overlay | None
    timeout_s: float

    @property
    def python(self) -> str:
        return sys.executable if self.overlay is None else str(self.overlay.python)

    def run(self, *arguments: str) -> Done:
        """``python arguments…`` there. The folder in which the user is does not come before packages."""
        done = run_limited([self.python, "-P", *arguments], self.timeout_s, variables(self.overlay))
        return replace(done, err=self.shortened(done.err))

    def shortened(self, text: str) -> str:
        """Without the folder of the environment, which nobody will find later."""
        return text if self.overlay is None else text.replace(f"{self.overlay.site_packages}/", "")

    def nemorl(self, *arguments: str) -> Done:
        return self.run("-m", "nemorl", *arguments)


def try_imports(modules: Sequence[str], new: Side, present: Side) -> list[Trial]:
    """Each module of the changed distribution, in a process of its own."""
    found = []
    for module in modules:
        done = new.run("-c", f"import {module}")
        both = done.code != 0 and present.run("-c", f"import {module}").code != 0
        found.append(_trial(f"import {module}", done, both))
    return found


def try_listing(new: Side, present: Side) -> Trial:
    """`nemorl plugins list`: no plugin may lose its status."""
    lists = [side.nemorl("plugins", "list", "--json") for side in (new, present)]
    states = [_states(done) for done in lists]
    if states[0] is None:
        return _trial("plugins list", lists[0], states[1] is None)
    was_ok = (name for name, state in (states[1] or {}).items() if state == "ok")
    now = {name: states[0].get(name, "gone") for name in was_ok}
    lost = [f"{name}: {state}" for name, state in now.items() if state != "ok"]
    return Trial("plugins list", "failed" if lost else "passed", lists[0].seconds, "; ".join(lost))


def doctor_findings(new: Side, present: Side) -> list[str]:
    """What `nemorl doctor` says there and not here: requirements that the version does not fit, above all."""
    told = []
    for side in (new, present):
        done = side.nemorl("doctor", "--json")
        try:
            told.append(
                [finding["what"] for finding in json.loads(done.out)["findings"] if "hides" not in finding["what"]]
            )
        except (ValueError, LookupError, TypeError):
            return [] if side is present else [f"nemorl doctor: {done.error}"]
    return [what for what in told[0] if what not in told[1]]


def try_plugin(entry: PluginEntry, new: Side, present: Side, *, full: bool) -> Trial:
    """The conformance checks of a plugin, those of `nemorl plugins check`."""
    name = f"{singular(entry.kind)} {entry.name}"
    if find_spec("nemorl_testing") is None:
        return Trial(name, "skipped", 0.0, "nemorl-testing is not installed")
    done, problems, passed = _checked(entry, new, full)
    if not problems:
        return Trial(name, "passed" if passed else "skipped", done.seconds, "" if passed else "nothing could be tried")
    _, before, _ = _checked(entry, present, full)
    own = [problem for problem in problems if _seen(problem) not in map(_seen, before)]
    outcome: Outcome = "failed" if own else "failed in both"
    return Trial(name, outcome, done.seconds, _seen((own or problems)[0]), "\n".join(problems))


def _checked(entry: PluginEntry, side: Side, full: bool) -> tuple[Done, list[str], bool]:
    """How it ended; faults; whether a check was tried at all."""
    with tempfile.TemporaryDirectory(prefix="nemorl-try-") as scratch:
        answer = Path(scratch) / "answer.json"
        options = ["--full"] if full else []
        done = side.run("-m", "nemorl_testing.smoke", *options, entry.kind, entry.id, str(answer))
        if not answer.is_file():
            return done, [done.error], False
        found = json.loads(answer.read_text(encoding="utf-8"))
    texts = ["\n".join(filter(None, (p["what"], p.get("traceback", "")))) for p in found["problems"]]
    return done, [side.shortened(text) for text in texts], bool(found["passed"])


def _seen(problem: str) -> str:
    """The line of a problem that says what was seen: of a broken clause, `check: seen`."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    seen = next((line.removeprefix("seen:").strip() for line in lines if line.startswith("seen:")), None)
    check = next((line.rpartition(".check_")[2] for line in lines if line.startswith("check:")), "")
    return f"{check}: {seen}" if seen else lines[0]


def _trial(name: str, done: Done, both: bool) -> Trial:
    if done.code == 0:
        return Trial(name, "passed", done.seconds)
    return Trial(name, "failed in both" if both else "failed", done.seconds, done.error, done.err)


def _states(done: Done) -> Mapping[str, str] | None:
    try:
        entries: list[dict[str, Any]] = json.loads(done.out)
        return {f"{entry['kind']}/{entry['id']}": entry["status"] for entry in entries}
    except (ValueError, LookupError, TypeError):
        return None
