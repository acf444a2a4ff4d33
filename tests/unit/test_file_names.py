"""All tests can be collected at once: a module outside a package has a name of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_modules_outside_packages_have_one_name() -> None:
    files = [file for file in TESTS.rglob("*.py") if not (file.parent / "__init__.py").is_file()]
    names = Counter(file.name for file in files if file.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
