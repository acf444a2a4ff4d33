"""The page that sets engines side by side says what their configs declare."""

from __future__ import annotations

from pathlib import Path

from nemorl.plugins import registry

PAGE = Path(__file__).parents[3] / "docs/backends/engines.md"
OF_THE_KERNEL = {"any_transport"}
"""Says how weights may come, not what an engine can."""


def table() -> list[list[str]]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows if not row.startswith("|--")]


def test_the_table_of_engines_is_what_they_declare() -> None:
    (_, *names, _), *rows = table()
    said = {name: {row[0] for row in rows if row[place] == "yes"} for place, name in enumerate(names, 1)}
    declared = {name: registry().load("generation_backends", name).supports - OF_THE_KERNEL for name in names}
    assert said == declared
    assert {cell for row in rows for cell in row[1:-1]} == {"yes", "-"}
