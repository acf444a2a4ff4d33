"""The certificate of losses finds each planted bug by its clause, prints a test of it, and alarms nobody else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import planted_losses
import pytest
import test_every_loss
import torch
from nemorl.errors import UsageError
from nemorl_preference.rm.loss import BradleyTerryLoss
from nemorl_testing.losses import LossCertificate, Outcome, certify_loss
from nemorl_testing.losses.cases import Case, Row
from nemorl_testing.losses.drawing import OF_ROWS, OF_TOKENS, Shape, draw_cases
from nemorl_testing.losses.shrinking import shrink
from planted_losses import PLANTED, SOUND
from recorded_messages import Raises

HERE = str(Path(__file__).parent)
KNOWN = [loss for loss in test_every_loss.LOSSES if loss.requires <= OF_TOKENS.keys() | OF_ROWS.keys()]
"""Installed losses that read fields of which the kit knows what they may hold. The others (ORPO, KTO, Clip-Cov, …) are
certified on the first step of their algorithm, by the check ``losses_are_certified``."""
FIRST_OF_EACH = list({type(loss): loss for loss in reversed(KNOWN)}.values())
"""One of each class."""


def run_printed(test: str, namespace: dict[str, Any] | None = None) -> None:
    """Run what the certificate printed, as its author would, with another loss where one is given."""
    names: dict[str, Any] = {}
    exec(compile(test, "<printed test>", "exec"), names)
    names.update(namespace or {})
    (found,) = [value for name, value in names.items() if name.startswith("test_")]
    found()


def broken(certificate: LossCertificate) -> set[str]:
    return {outcome.name for outcome in certificate.broken}


def test_there_are_more_planted_bugs_than_twenty_one_and_each_is_another_class() -> None:
    kinds = {type(loss) for loss, _ in PLANTED}
    assert len(kinds) == len(PLANTED) == 35
    module = vars(planted_losses).values()
    written = {one for one in module if isinstance(one, type) and one.__module__ == planted_losses.__name__}
    assert written - kinds == {type(loss) for loss in SOUND}


@pytest.mark.slow
@pytest.mark.parametrize("loss", SOUND, ids=lambda loss: type(loss).__name__)
def test_what_the_bugs_are_planted_in_is_sound(loss: Any) -> None:
    certificate = certify_loss(loss)
    assert certificate.is_sound, str(certificate)
    assert len(certificate.outcomes) >= 19


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "clause"), PLANTED, ids=lambda one: one if isinstance(one, str) else type(one).__name__
)
def test_every_planted_bug_is_found_by_its_clause(loss: Any, clause: str) -> None:
    certificate = certify_loss(loss)
    assert clause in broken(certificate), str(certificate)
    for outcome in certificate.broken:
        with pytest.raises((AssertionError, UsageError, AttributeError)):  # a lambda cannot be sent
            run_printed(outcome.test)


@pytest.mark.slow
@pytest.mark.parametrize("loss", FIRST_OF_EACH, ids=lambda loss: type(loss).__name__)
def test_no_installed_loss_is_alarmed_about(loss: Any) -> None:
    certificate = certify_loss(loss, is_value=isinstance(loss, BradleyTerryLoss))
    assert certificate.is_sound, str(certificate)


@pytest.mark.full
@pytest.mark.parametrize("loss", KNOWN, ids=lambda loss: type(loss).__name__)
def test_no_variant_of_an_installed_loss_is_alarmed_about(loss: Any) -> None:
    certificate = certify_loss(loss, is_value=isinstance(loss, BradleyTerryLoss))
    assert certificate.is_sound, str(certificate)


def test_the_printed_test_is_small_fails_with_the_bug_and_passes_without_it() -> None:
    certificate = certify_loss(planted_losses.DividesByRowsShown())
    found = next(outcome for outcome in certificate.broken if outcome.name == "microbatches_add_up")
    # Two rows of a prompt token and a response token: with one row, the whole is the microbatch.
    assert "[[1, 2], [1, 2]]" in found.test
    assert "outputs = torch.tensor([0.0, -1.0, 0.0, -1.0])" in found.test or "False, False" in found.test
    assert "nemorl_testing" not in found.test
    with pytest.raises(AssertionError, match="microbatches"):
        run_printed(found.test)
    run_printed(found.test, {"DividesByRowsShown": planted_losses.Sound})


def test_a_printed_test_runs_in_pytest_by_itself(tmp_path: Path) -> None:
    certificate = certify_loss(planted_losses.ClimbsTheLoss())
    (tmp_path / "test_printed.py").write_text(certificate.broken[0].test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_printed.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**_environment()}, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "log p of the better action falls" in done.stdout


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": HERE}


def test_a_case_is_shrunk_to_the_one_row_that_fails() -> None:
    cases = list(draw_cases(Shape.of(planted_losses.Sound()), 3))
    # Fails wherever an advantage is negative: one row, one trained token, the simplest negative number.
    small = shrink(cases[2], lambda case: any(a < 0 for row in case.rows for a in row.tokens["advantages"]))  # type: ignore[operator]
    (row,) = small.rows
    assert row.mask == (False, True)
    assert (row.token_ids, row.outputs, row.tokens["advantages"]) == ((1, 2), (0.0, -1.0), (0.0, -1.0))


def test_a_case_is_the_batch_that_it_says() -> None:
    row = Row((5, 6), (False, True), (0.0, -1.0), {"advantages": (0.0, 2.0)}, {"margins": 0.5})
    case = Case((row, row), group=2, aggregation="sequence")
    assert case.outputs.tolist() == [0.0, -1.0, 0.0, -1.0]
    assert case.batch.loss_weights.tolist() == [0.0, 0.5, 0.0, 0.5]
    assert case.batch["margins"].tolist() == [0.5, 0.5]
    assert case.batch.sequences_per_group == 2


def test_a_field_that_nobody_knows_is_drawn_from_an_example_and_refused_without_one(raises: Raises) -> None:
    loss = planted_losses.Sound(requires=planted_losses.FIELDS | {"novelty"})
    with raises(UsageError, "novelty"):
        certify_loss(loss)
    case = next(draw_cases(Shape.of(planted_losses.Sound()), 1))
    example = case.batch.with_tokens(novelty=torch.arange(case.batch.num_tokens).float())
    (drawn,) = draw_cases(Shape.of(loss, example=example), 1)
    trained = example["novelty"][example.mask].tolist()
    assert set(drawn.batch["novelty"][drawn.batch.mask].tolist()) <= set(trained)


def test_what_a_loss_detaches_is_held_fixed_and_what_it_takes_by_number_is_not() -> None:
    assert "gradient_is_that_of_the_value" not in broken(certify_loss(planted_losses.SoundCISPO()))
    found = broken(certify_loss(planted_losses.TakesItsWeightByItem()))
    assert "gradient_is_that_of_the_value" in found


def test_a_reward_model_that_prefers_the_rejected_is_found() -> None:
    certificate = certify_loss(planted_losses.RejectedFirst(), is_value=True)
    assert broken(certificate) == {"a_step_raises_the_better_value"}
    assert broken(certify_loss(planted_losses.SoundPairs(), is_value=True)) == set()


def test_a_certificate_says_each_clause_as_json() -> None:
    told: list[Outcome] = []
    certificate = certify_loss(planted_losses.DetachesEverything(), told=told.append)
    assert tuple(told) == certificate.outcomes
    answer = json.loads(json.dumps(certificate.as_dict()))
    (only,) = answer["clauses"]  # what does not compute is not tried further
    assert (only["name"], only["state"]) == ("it_computes", "broken")
    assert only["seen"].startswith("its value has no gradient")
    ast.parse(only["test"])
    assert answer["loss"] == "DetachesEverything()"


def test_plugins_check_certifies_a_loss_by_its_place(tmp_path: Path) -> None:
    names = [f"planted_losses:{name}" for name in ("Sound", "ClimbsTheLoss", "Nowhere")]
    command = [sys.executable, "-m", "nemorl", "plugins", "check", *names, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False, timeout=300)
    sound, climbs, nowhere = json.loads(done.stdout)
    assert done.returncode == 1
    assert (sound["ok"], sound["kind"], len(sound["passed"])) == (True, "losses", 20)
    assert [problem["what"].partition(":")[0] for problem in climbs["problems"]] == [
        "a_step_raises_the_better_action",
        "a_clip_lets_come_back",
    ]
    assert "def test_a_step_raises_the_better_action" in climbs["problems"][0]["test"]
    assert "is no plugin, and no loss" in nowhere["problems"][0]["what"]
