"""Writes the tables of fields in ``docs/agents/gateway.md`` from the APIs of ``nemorl-agents``.

    python docs/generate_gateway.py            fill in the tables
    python docs/generate_gateway.py --check    exit 1 if they are not what would be written

What is outside ``<!-- generated: fields -->`` and ``<!-- end -->`` is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from nemorl_agents.gateway.fields import Field
from nemorl_agents.gateway.server import APIS

PAGE = Path(__file__).resolve().parent / "agents" / "gateway.md"
PART = re.compile(r"(<!-- generated: fields -->\n).*?(<!-- end -->)", re.DOTALL)


def tables() -> str:
    """One table per API, one row per field."""
    parts = []
    for api in APIS:
        rows = [f"| `{name}` | {treatment(field)} | {field.note} |" for name, field in api.fields.items()]
        parts.append("\n".join([f"### `{api.path}`", "", "| field | | |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def treatment(field: Field) -> str:
    """What becomes of a field, and which values of a refused one pass."""
    passing = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral if field.treatment == "refused")
    return f"{field.treatment}, but for {passing}" if passing else field.treatment


def filled_in(page: str) -> str:
    """The page with the tables as they should be."""
    return PART.sub(lambda match: f"{match[1]}\n{tables()}\n\n{match[2]}", page)


if __name__ == "__main__":
    from pages import update

    sys.exit(update({PAGE: filled_in(PAGE.read_text("utf-8"))}))
