"""Which of a test's cases run in which tier, which are measured, and which share a worker of pytest-xdist."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Sized)

TESTS = Path(__file__).parent
MEASURED = (
    *("base", "core", "rl", "tensors", "report", "isolation", "commands", "testing", "media"),
    *("transports", "directory", "site"),
)
"""Folders of ``tests/unit`` for the lines of kernel and toolkits, of which they alone have to reach 85 %."""

_selected: dict[str, Any] = {}


def pytest_configure(config: pytest.Config) -> None:
    _selected["marks"] = config.getoption("markexpr")


@pytest.hookimpl(tryfirst=True)  # before others deselect, and before xdist reads the groups
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    files = defaultdict(list)
    for item in (item for item in items if item.path.is_relative_to(TESTS)):
        files[item.path.relative_to(TESTS).as_posix()].append(item)
    for file, its_items in files.items():
        group = _group(file, its_items)
        for item in its_items:
            item.add_marker(pytest.mark.xdist_group(group))
            if file.startswith("unit/") and file.split("/")[1] in MEASURED:
                item.add_marker(pytest.mark.measured)


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)  # after xdist
def groups_are_kept(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """xdist writes a group behind the name of a test, which some versions of pytest do not take over."""
    if getattr(config.option, "loadgroup", False) and items and "@" not in items[0].nodeid:
        raise pytest.UsageError(f"pytest {pytest.__version__} ignores the groups of pytest-xdist: requirements-dev.txt")


def _group(file: str, items: Sequence[pytest.Item]) -> str:
    """What one worker runs: a file, which makes what its tests share once; all of Ray, on one cluster; all of vLLM
    and Megatron, whose engines must not find the ports or the memory of another.
    """
    marks = {mark.name for item in items for mark in item.iter_markers()}
    if file.startswith("unit/"):
        return file
    if marks & {"vllm", "megatron"}:
        return "engines"
    needs_ray = "ray" in marks or any("private_ray" in getattr(item, "fixturenames", ()) for item in items)
    return "ray" if needs_ray else file


def in_full(cases: T) -> T:
    """These in the tier that has everything, as ``make test-full``; elsewhere none of them.

    For modules whose cases share processes: a mark would come too late to leave a case out.
    """
    from _pytest.mark.expression import Expression

    marks = _selected.get("marks", "")
    is_full = not marks or Expression.compile(marks).evaluate(lambda name, **_: name == "full")
    return cases if is_full else type(cases)()


def only(*kept: object, of: Iterable[object]) -> list[Any]:
    """The values of a parameter, of which those not ``kept`` wait for ``make test-full``."""
    return [pytest.param(value, marks=[] if value in kept else pytest.mark.full) for value in of]
