"""Writes the table of presets in ``docs/datasets.md`` from the preset files of ``nemorl-tasks``.

    python docs/generate_datasets.py            fill in the table
    python docs/generate_datasets.py --check    exit 1 if it is not what would be written

What is outside ``<!-- generated: presets -->`` and ``<!-- end -->`` is written by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nemorl_tasks.datasets.preset_file import listed

PAGE = Path(__file__).resolve().parent / "datasets.md"
PART = re.compile(r"(<!-- generated: presets -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """One row per preset."""
    lines = ["| name | task | rows | licence | what it is |", "|---|---|---|---|---|"]
    for entry in listed():
        names = f"[`{entry.name}`]({entry.homepage})" + "".join(f", `{name}`" for name in entry.other_names)
        rows = ", ".join(f"{count:,} {split}" for split, count in entry.rows.items()) or (
            "not stated" if entry.hub else "yours"
        )
        lines.append(f"| {names} | {entry.task} | {rows} | {entry.licence} | {entry.summary} |")
    return "\n".join(lines)


def filled_in(page: str) -> str:
    """The page with the table as it should be."""
    return PART.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", page)


if __name__ == "__main__":
    from pages import update

    sys.exit(update({PAGE: filled_in(PAGE.read_text("utf-8"))}))
