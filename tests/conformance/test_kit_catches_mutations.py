"""The kit proves itself: every check of every kind is failed by a plugin that breaks this clause and no other."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from mutants import ALONE, BASES, SOUND, TOGETHER, Mutant
from nemorl.errors import UsageError
from nemorl.plugins import Registry
from nemorl.plugins.index import PREFIX, singular
from nemorl.plugins.registry import config_bases
from nemorl_testing import ConformanceError, Report, check_plugin, checks_for, conformance, run_checks
from nemorl_testing.kit import CHECKED_KINDS, CONFIG_KINDS
from recorded_messages import Raises

SHARED = {check.name for check in checks_for("datasets") if not check.function.__module__.endswith(".datasets")}
"""Checks that are the same code for every config class: a mutant of one kind is enough."""
USABLE = "entry_point_is_usable"


def marks_of(mutant: Mutant) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow, *([pytest.mark.full] if mutant.is_slow else [])]


def cases(mutants: tuple[Mutant, ...]) -> list[object]:
    return [pytest.param(mutant, id=f"{mutant.kind}-{mutant.name}", marks=marks_of(mutant)) for mutant in mutants]


def run(mutant: Mutant, registry: Registry, only: Collection[str] = ()) -> Report:
    """All checks on a mutant, installed as ``broken``, or only some."""
    registry.index = registry.index.with_entry(entry_point("broken", mutant))
    return run_checks(mutant.kind, {"name": "broken", **mutant.options}, only=sorted(only), **mutant.settings)


def entry_point(name: str, mutant: Mutant) -> EntryPoint:
    return EntryPoint(name, f"broken.{mutant.value}", PREFIX + mutant.kind)


@pytest.mark.parametrize("mutant", cases(SOUND))
def test_what_the_mutants_derive_from_is_sound(mutant: Mutant, nemorl_registry: Registry) -> None:
    report = run(mutant, nemorl_registry)
    assert list(map(str, report.failed.values())) == []
    assert report.skipped.keys() == mutant.skips


@pytest.mark.parametrize("mutant", cases((*ALONE, *TOGETHER)))
def test_mutant_fails_the_checks_whose_clause_it_breaks(mutant: Mutant, nemorl_registry: Registry) -> None:
    report = run(mutant, nemorl_registry, only=mutant.fails)
    assert set(report.failed) == mutant.fails
    checks = {check.name: check for check in checks_for(mutant.kind)}
    for name, error in report.failed.items():
        first, clause, seen, check = split(error.message)
        assert first == f"{singular(mutant.kind)} 'broken' breaks a clause of its contract"
        assert clause == checks[name].clause
        assert clause.endswith(f"(DESIGN {checks[name].section})")
        assert seen
        assert check == f"{checks[name].function.__module__}.check_{name}"


@pytest.mark.full
@pytest.mark.parametrize("mutant", cases((*ALONE, *TOGETHER)))
def test_mutant_fails_no_other_check(mutant: Mutant, nemorl_registry: Registry) -> None:
    report = run(mutant, nemorl_registry)
    assert set(report.failed) == mutant.fails, "\n".join(error.message for error in report.failed.values())


def split(message: str) -> list[str]:
    """The parts of a failure message: headline, clause, what was seen, check."""
    headline, rest = message.split("\n  clause: ")
    clause, rest = rest.split("\n  seen:   ")
    return [headline, clause, *rest.split("\n  check:  ")]


def test_every_kind_that_has_a_config_class_is_held_to_what_every_config_promises() -> None:
    assert set(CONFIG_KINDS) == set(config_bases())
    for kind in CONFIG_KINDS:
        assert {check.name for check in checks_for(kind)} >= SHARED, kind


@pytest.mark.parametrize("kind", CHECKED_KINDS)
def test_every_check_has_a_mutant_that_breaks_it_alone(kind: str) -> None:
    caught = {name for mutant in ALONE if mutant.kind == kind for name in mutant.fails}
    if kind in CONFIG_KINDS:
        caught |= SHARED & {name for mutant in ALONE for name in mutant.fails}
    names = {check.name for check in checks_for(kind)} - {USABLE}  # of entry points: the next test
    assert sorted(names - caught) == []
    assert sorted(caught - names) == []


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("environments", "configs:Twin"),
        ("hooks", "hooks:TwinHook"),
        ("commands", "commands:twin"),
        ("templates", "templates:good.yaml"),
        ("report_sections", "report_sections:TwinSection"),
    ],
)
def test_entry_point_that_is_not_usable_fails_that_check_alone(
    kind: str, value: str, nemorl_registry: Registry
) -> None:
    # Two distributions have the name. The full id loads all the same, so that nothing else fails.
    sound = next(mutant for mutant in SOUND if mutant.kind == kind)
    points = [entry_point("twin", Mutant(kind, value, frozenset())), EntryPoint("twin", "os:path", PREFIX + kind)]
    for point in points:
        nemorl_registry.index = nemorl_registry.index.with_entry(point)
    module = f"broken.{value.partition(':')[0]}"
    name = next(e.id for e in nemorl_registry.index.of_kind(kind) if e.name == "twin" and e.value.startswith(module))
    report = run_checks(kind, {"name": name, **sound.options}, **sound.settings)
    assert list(report.failed) == [USABLE]
    assert "ambiguous" in report.failed[USABLE].message


def test_no_mistake_of_the_broken_package_is_left_out() -> None:
    listed = {mutant.name for mutant in (*SOUND, *ALONE, *TOGETHER)}
    for module in ("training", "generation", "environments", "algorithms", "hooks"):
        found = importlib.import_module(f"broken.{module}")
        written = {n for n, v in vars(found).items() if isinstance(v, type) and v.__module__ == found.__name__}
        helpers = {"GoodEnvironment", "AnyHook", "GoodHook", "TwinHook"}
        assert {n for n in written if not n.startswith("_")} - listed - helpers == set(), module


def test_exception_in_a_plugin_is_attributed_to_it(nemorl_registry: Registry) -> None:
    mutant = Mutant("environments", BASES["environments"], frozenset(), {"mistake": "FailsOnEmpty"})
    (error,) = run(mutant, nemorl_registry).failed.values()
    seen = split(error.message)[2]
    owner = "environment 'environment' (broken.environments.FailsOnEmpty)"
    assert seen.startswith(f"the plugin raised {owner} raised IndexError: list index out of range\n")
    assert "at broken/environments.py:" in seen
    assert seen.endswith("in score")


def test_exception_over_what_a_plugin_gave_says_so(nemorl_registry: Registry) -> None:
    mutant = Mutant("datasets", "unusable:NoRows", frozenset())
    report = run(mutant, nemorl_registry)
    seen = split(report.failed["rows_are_the_same_every_time"].message)[2]
    assert seen.startswith("what the plugin gave cannot be used: TypeError: object of type 'int' has no len()\n")
    assert "at nemorl_testing/datasets.py:" in seen


def test_plugin_that_exits_does_not_end_the_checks(nemorl_registry: Registry) -> None:
    report = run(Mutant("datasets", "unusable:Exits", frozenset()), nemorl_registry)
    seen = split(report.failed["rows_are_plain_data"].message)[2]
    assert seen.startswith("the plugin raised SystemExit: 3\n")
    assert "at broken/unusable.py:" in seen


def test_failure_names_clause_section_and_what_was_seen(nemorl_registry: Registry) -> None:
    nemorl_registry.index = nemorl_registry.index.with_entry(
        EntryPoint("broken", "broken.datasets:AnyDataset", "nemorl.datasets")
    )
    with pytest.raises(AssertionError) as raised:
        check_plugin("datasets", {"name": "broken", "mistake": "leaks"})
    assert isinstance(raised.value, ConformanceError)
    text = str(raised.value)
    assert "dataset 'broken' breaks a clause" in text
    assert "clause: No validation row is a training row. (DESIGN 5)" in text
    assert "seen:   10 of 10 validation rows are training rows, e.g. row [0]: {'prompt': '30+1='" in text
    assert "check:  nemorl_testing.datasets.check_validation_is_disjoint_from_training" in text


def test_unknown_kinds_and_checks_are_refused(raises: Raises) -> None:
    with raises(UsageError, "datasets"):
        conformance("dataset", "arithmetic")
    with raises(UsageError, "rows_are_plain_data"):
        conformance("datasets", "arithmetic", skip={"rows_are_plain_dta": "no"})


def test_kit_imports_neither_torch_nor_its_friends() -> None:
    code = (
        "import sys, nemorl_testing, nemorl_testing.plugin; print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_modules_of_broken_configs_are_light() -> None:
    names = sorted(path.stem for path in (Path(__file__).parent / "broken").glob("*.py"))
    heavy = ("training", "generation", "generation_weights", "trainers", "heavy", "loud")
    light = [name for name in names if name not in heavy]
    code = f"import {', '.join(f'broken.{name}' for name in light)}, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert done.stdout.strip() == "False"
