"""The threat model claims nothing without a test."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/security/threat-model.md"
REFERENCE = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def claims() -> list[tuple[str, str]]:
    """Rows of the tables under "Defended": the claim, and where it is shown."""
    defended = PAGE.read_text().partition("\n## Defended\n")[2].partition("\n## Not defended\n")[0]
    rows = [line.strip("|").split(" | ") for line in defended.splitlines() if line.startswith("| ")]
    return [(row[0].strip(), row[1]) for row in rows if row[0].strip() != "claim"]


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize(("claim", "shown_by"), claims(), ids=lambda text: text[:40])
def test_a_claim_names_tests_that_exist(claim: str, shown_by: str) -> None:
    found = REFERENCE.findall(shown_by)
    assert found, f"{claim}: no test"
    for file, name in found:
        assert name in names_in(file), f"{claim}: {file} has no {name}"


def test_there_are_claims_in_every_table() -> None:
    assert len(claims()) >= 30
