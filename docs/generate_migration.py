"""Writes ``docs/nemo-rl-keys.md`` and the table of sections in ``docs/migration.md`` from the table of NeMo RL's keys.

python docs/generate_migration.py            write both
python docs/generate_migration.py --check    exit 1 if one is not what would be written
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.base.text.yaml_text import format_yaml
from nemorl_compat.key_table import GROUPS, Row, tables

DOCS = Path(__file__).resolve().parent
PAGE, KEYS = DOCS / "migration.md", DOCS / "nemo-rl-keys.md"
PART = re.compile(r"(<!-- generated: sections -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = """# What becomes of NeMo RL's keys

Generated from `nemorl_compat/keys/*.yaml` by `docs/generate_migration.py`; do not edit. How to read it is told in
[Migration](migration.md#configs). `*` stands for any text, `{a,b}` for one of them, `{section}` for the algorithm's own
section. A key's row holds for the values that it names; the last column is for all others.

Keys of `teacher` and `value` that have no row are read as the policy's: where `policy.X` becomes `policy.Y`, `value.X`
becomes `critic.Y` (its backend, sizes, precision, checkpointing, optimizer, schedule and clipping), and all others have
to agree with the policy's.
"""
SHOWN_FEATURES = 6
"""Features that the table of sections names; the page of keys has all."""


def keys_page() -> str:
    """The page of all keys."""
    parts = [HEAD]
    for title, rows in tables().items():
        parts += [f"\n## {title}\n", "| key | nemorl | neutral when | otherwise |", "|---|---|---|---|"]
        parts += [_line(row) for row in rows]
    return "\n".join(parts) + "\n"


def _line(row: Row) -> str:
    keys = ", ".join(f"`{key}`" for key in row.keys)
    only = f" ({', '.join(row.only)})" if row.only else ""
    to = f"`{row.to}`" if row.to else ""
    if row.to and row.mapped_values is not None:
        to += f" for {_values(row.mapped_values)}"
    cells = (keys + only, to, "; ".join(_neutral(row)), "; ".join(_otherwise(row)))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _neutral(row: Row) -> list[str]:
    found = [f"{_key(path)} is {_values(values)}" for path, values in row.conditions.items()]
    found += [f"{_key(path)} is not {_values(values)}" for path, values in row.exceptions.items()]
    found += [f"it is {_values(row.values)}"] if row.values else []
    found += [f"it is `{row.same_as}`"] if row.same_as else []
    is_always = row.neutral and not found and not row.to and not row.missing and not row.differs
    return [f"always: {GROUPS[str(row.neutral)]}"] if is_always else found


def _otherwise(row: Row) -> list[str]:
    found = [f"different: {row.differs}"] if row.differs else []
    if row.missing or row.feature:
        found.append(f"**not supported**: {row.missing or 'by its value'}")
    return found


def _key(path: str) -> str:
    return f"the config's {path.removeprefix('facts.').replace('_', ' ')}" if path.startswith("facts.") else f"`{path}`"


def _values(values: Sequence[Any]) -> str:
    return " or ".join(f"`{format_yaml(value, one_line=True).strip()}`" for value in values)


def sections() -> str:
    """One row per section: how many rows of each kind, and what is not supported."""
    lines = ["| section | rows | mapped | not supported, among others |", "|---|---|---|---|"]
    for title, rows in tables().items():
        mapped = sum(row.to is not None for row in rows)
        features = list(dict.fromkeys(row.missing for row in rows if row.missing))
        more = f" and {len(features) - SHOWN_FEATURES} more" if len(features) > SHOWN_FEATURES else ""
        shown = "; ".join(features[:SHOWN_FEATURES]) + more
        anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        lines.append(f"| [{title}](nemo-rl-keys.md#{anchor}) | {len(rows)} | {mapped} | {shown} |")
    return "\n".join(lines) + "\n"


def filled_in(text: str) -> str:
    """The page of migration with its table as it should be."""
    return PART.sub(lambda found: f"{found[1]}\n{sections()}\n{found[2]}", text)


def wanted() -> Mapping[Path, str]:
    """Each page, and what it should say."""
    return {KEYS: keys_page(), PAGE: filled_in(PAGE.read_text("utf-8"))}


if __name__ == "__main__":
    from pages import update

    sys.exit(update(wanted()))
