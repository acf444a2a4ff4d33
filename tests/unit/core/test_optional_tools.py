"""What `make test-optional` says of a report, and that its list names what there is."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "tools"
MODULES = {
    "verifiers": "verifiers",
    "openenv": "openenv",
    "swanlab": "swanlab",
    "dstack": "dstack",
    "sky": "skypilot",
    "tinker_cookbook": "tinker-cookbook",
}
"""Modules that no machine has by ``requirements-dev.txt``, and the group of ``environments.toml`` that has each."""
ON_DEVICES = {"flash_attn"}
"""Of CUDA devices alone: benchmarks/gpu runs these tests."""


@pytest.fixture(scope="module")
def optional() -> Iterator[ModuleType]:
    """The program of tools/optional, which imports from tools/release."""
    release, own = str(TOOLS / "release"), str(TOOLS / "optional")
    sys.path.insert(0, own)
    yield importlib.import_module("run_optional")
    for folder in (own, release):
        sys.path.remove(folder)
    for name in ("run_optional", "steps"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def groups(optional: ModuleType) -> list[Any]:
    found: list[Any] = optional.read_groups(TOOLS / "optional" / "environments.toml")
    return found


def report(folder: Path, *cases: str) -> Path:
    """As pytest writes it."""
    file = folder / "report.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return file


PASSED = '<testcase classname="test_a" name="test_one"/>'
SKIPPED = '<testcase classname="" name="test_b"><skipped message="dstack is not installed"/></testcase>'
FAILED = '<testcase classname="test_a" name="test_two"><failure message="assert 1 == 2"/></testcase>'


def test_all_that_passed_is_no_problem(optional: ModuleType, tmp_path: Path) -> None:
    found = optional.judge("a==1", report(tmp_path, PASSED), 0)
    assert (found.ran, found.passed, found.problems, found.verdict) == (1, 1, (), "passed")


def test_a_test_that_still_skips_is_a_problem_and_did_not_run(optional: ModuleType, tmp_path: Path) -> None:
    found = optional.judge("a==1", report(tmp_path, PASSED, SKIPPED), 0)
    assert (found.ran, found.passed) == (1, 1)
    assert found.verdict.startswith("FAILED: skipped: test_b: ")
    assert "dstack is not installed" in found.verdict


def test_a_test_that_fails_ran_and_did_not_pass(optional: ModuleType, tmp_path: Path) -> None:
    found = optional.judge("a==1", report(tmp_path, PASSED, FAILED), 1)
    assert (found.ran, found.passed) == (2, 1)
    assert "assert 1 == 2" in found.verdict


def test_no_test_and_no_report_are_problems(optional: ModuleType, tmp_path: Path) -> None:
    assert optional.judge("a==1", report(tmp_path), 5).problems
    assert optional.judge("a==1", tmp_path / "none.xml", 4).problems
    assert optional.judge("a==1", report(tmp_path, PASSED), 3).problems  # pytest broke after it


def test_what_cannot_be_had_is_told_and_does_not_fail(optional: ModuleType) -> None:
    environment = optional.Environment("a", packages=("a==1",))
    group = optional.Group("a", environment, ("tests/none.py",), not_available="no wheel for this platform")
    found = optional.run_group(group)
    assert not found.problems
    assert "a==1              0          0       not available: no wheel for this platform" in optional.table(
        {"a": found}
    )


def test_every_group_names_tests_that_exist_and_exact_versions(groups: list[Any]) -> None:
    for group in groups:
        for test in group.tests:
            file, _, name = test.partition("::")
            written = ast.parse((ROOT / file).read_text("utf-8"))
            names = {node.name for node in written.body if isinstance(node, ast.FunctionDef)}
            assert not name or name in names, test
        for requirement in (*group.environment.packages, *group.peer, *filter(None, [group.wheel])):
            assert "==" in requirement
        for folder in group.environment.ours:
            assert (ROOT / folder / "pyproject.toml").is_file()


def test_a_package_that_tests_skip_for_is_installed_here_or_in_a_group(groups: list[Any]) -> None:
    asked = {
        name.partition(".")[0]
        for file in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"""importorskip\(\s*["']([\w.]+)["']""", file.read_text("utf-8"))
    }
    names = {group.name for group in groups}
    known = {module for module, group in MODULES.items() if group in names}
    assert [name for name in asked - known - ON_DEVICES if find_spec(name) is None] == []
