"""Numbers and texts of a run as a report shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl_cli.report.run_data import is_number

MAX_CHARACTERS = 3000
"""Of one response; the rest is counted, not shown."""


def number(value: float | None) -> str:
    """Four significant digits, thousands separated."""
    if value is None:
        return "–"
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def cell(value: Any) -> str:
    """A value in a table: numbers short, a dash for what is missing."""
    if value is None:
        return "–"
    return number(float(value)) if is_number(value) else str(value)


def words(value: Any) -> str:
    """A leaf of ``environment.json``: lists as words, records by their values."""
    if isinstance(value, Mapping):
        return " ".join(str(item) for item in value.values())
    return ", ".join(words(item) for item in value) if isinstance(value, list) else str(value)


def clip(value: Any) -> str:
    text = "" if value is None else str(value)
    more = len(text) - MAX_CHARACTERS
    return text if more <= 0 else f"{text[:MAX_CHARACTERS]}… ({more:,} more characters)"
