"""``nemorl try`` from end to end: a version that works, two that break, one with other numbers. No network."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from nemorl_insight.doctor.upgrades.drill import Drill
from nemorl_insight.doctor.upgrades.overlays import cache_folder
from nemorl_insight.doctor.upgrades.processes import Done
from nemorl_insight.doctor.upgrades.resolving import Change
from nemorl_insight.doctor.upgrades.steps import Numbers, largest_difference
from nemorl_insight.doctor.upgrades.trials import Trial, try_listing
from real_runs import fingerprint, real_run


def options(pip_args: Sequence[str]) -> tuple[str, str]:
    """pip's own, as the command is given them."""
    return "--pip", shlex.join(pip_args)


def numbers(**changes: Any) -> Numbers:
    same: dict[str, Any] = {
        "step": 1,
        "samples": 4,
        "equal_samples": 4,
        "generation_logprobs": 0.0,
        "trainer_logprobs": 0.0,
        "loss": (0.5, 0.5),
        "grad_norm": (2.0, 2.0),
    }
    return Numbers(**{**same, **changes})


def made(**changes: Any) -> Drill:
    return Drill([Change("acmelib", "1.0", "1.1", 1)], [], **changes)


def test_a_verdict_is_of_checks_first_and_of_numbers_then() -> None:
    assert made(numbers=numbers()).verdict == "works"
    assert made(numbers=numbers(loss=(0.5, 0.5 + 2**-20))).verdict == "works, numbers differ"
    assert made(numbers=numbers(loss=(0.5, 0.5 + 2**-20)), tolerance=1e-6).verdict == "works"
    # A norm of 2.0 that is 2.02 elsewhere is another by a hundredth of itself.
    assert numbers(grad_norm=(2.0, 2.02)).largest == pytest.approx(0.01)
    assert made(numbers=numbers(equal_samples=3), tolerance=1.0).verdict == "works, numbers differ"
    broken = Trial("environment acme", "failed", 1.0, "scores_are_finite: nan")
    assert made(numbers=numbers(), trials=[broken]).verdict == "breaks"
    assert made(trials=[broken]).why == "environment acme: scores_are_finite: nan"
    assert made(trials=[Trial("environment acme", "failed in both", 1.0)]).verdict == "works"


def test_the_largest_difference_is_of_all_tokens_and_fields() -> None:
    one = {"sequences": [{"old_logprobs": [-1.0, -2.0], "policy_logprobs": [-1.0, -3.5]}]}
    other = {"sequences": [{"old_logprobs": [-1.25, -2.0], "policy_logprobs": [-1.0, -3.0]}]}
    assert largest_difference([(one, other)], ("old_logprobs",)) == 0.25
    assert largest_difference([(one, other)], ("old_logprobs", "policy_logprobs")) == 0.5
    assert largest_difference([({"sequences": [{"old_logprobs": None}]}, one)], ("old_logprobs",)) is None


@pytest.mark.full
class Listing:
    """A side whose plugins have these states."""

    def __init__(self, **states: str) -> None:
        self.entries = [{"kind": "losses", "id": name, "status": state} for name, state in states.items()]

    def nemorl(self, *arguments: str) -> Done:
        return Done(0, json.dumps(self.entries), "", 1.0)


def test_a_plugin_that_is_gone_has_lost_its_status_and_one_that_never_worked_has_not() -> None:
    before: Any = Listing(a="ok", b="ok", c="ok", d="broken")
    after: Any = Listing(a="ok", b="missing", d="broken", e="broken")
    found = try_listing(after, before)
    assert (found.outcome, found.error) == ("failed", "losses/b: missing; losses/c: gone")
    assert try_listing(before, before).outcome == "passed"


def test_a_download_that_nobody_agreed_to_does_not_happen(
    acme: Path, nemorl: Command, pip_args: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemorl_insight.doctor.upgrades.command.ASK_BYTES", 10)
    done = nemorl("try", "acmelib==1.1", *options(pip_args))
    assert done.code == 2
    assert "--yes" in done.err
    assert not cache_folder().exists()


@pytest.mark.full
def test_a_dry_run_says_what_would_change(acme: Path, nemorl: Command, pip_args: Sequence[str]) -> None:
    [changes] = nemorl("try", "acmelib==5.0", "--dry-run", "--json", *options(pip_args)).json
    assert [(c["name"], c["before"], c["version"]) for c in changes] == [
        ("acmelib", "1.0", "5.0"),
        ("acmetools", "1.0", "2.1"),
    ]
    assert not cache_folder().exists()


@pytest.mark.parametrize(
    ("words", "fact"),
    [((), "--help"), (("acmelib==1.0",), "installed"), (("no such",), "requirement"), (("a @ file:///x",), "file")],
)
def test_what_cannot_be_tried_is_refused(
    acme: Path, nemorl: Command, pip_args: Sequence[str], words: tuple[str, ...], fact: str
) -> None:
    done = nemorl("try", *words, *options(pip_args))
    assert (done.code, fact in done.err) == (2, True)


@pytest.mark.slow
@pytest.mark.full
def test_versions_that_work_break_and_differ(
    acme: Path, nemorl: Command, pip_args: Sequence[str], tiny_model: Path, tmp_path: Path
) -> None:
    run = real_run(tiny_model, tmp_path / "run", environment="acme_counting", max_steps=2)
    before, here = fingerprint(run), fingerprint(acme)
    report = tmp_path / "report.json"
    wanted = [f"acmelib=={version}" for version in ("1.1", "2.0", "3.0", "4.0")]
    done = nemorl("try", *wanted, "--run", run, "--output", report, "--json", *options(pip_args))
    assert done.code == 1
    assert json.loads(report.read_text()) == done.json
    works, lacks, differs, unimportable = done.json["versions"]

    assert (works["verdict"], works["why"]) == ("works", "bit-equal")
    assert works["numbers"]["equal_samples"] == works["numbers"]["samples"] == 32
    assert "environment acme_counting" in [trial["name"] for trial in works["trials"]]

    assert lacks["verdict"] == "breaks"
    assert "value" in lacks["why"]  # cannot import name 'value' from 'acmelib'

    # The tokens are those of the same weights; what they are worth is another, and so is the update.
    assert differs["verdict"] == "works, numbers differ"
    found = differs["numbers"]
    assert (found["equal_samples"], found["generation_logprobs"]) == (32, 0.0)
    assert found["grad_norm"][0] != found["grad_norm"][1]
    assert differs["broken_requirements"] == ["acme-counting 1.2 asks for acmelib>=1.0,<2"]

    assert unimportable["verdict"] == "breaks"
    assert unimportable["why"].startswith("import acmelib: ImportError: libacme.so.4")

    [line] = done.json["requirements"]
    assert (line["now"], line["after"]) == ("acmelib>=1.0,<2", "acmelib>=1.0,<2")
    assert fingerprint(run) == before
    assert {k: v for k, v in fingerprint(acme).items() if "__pycache__" not in k} == {
        k: v for k, v in here.items() if "__pycache__" not in k
    }
    assert not [path for path in cache_folder().glob("*") if path.name != "reports"]
