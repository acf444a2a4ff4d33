"""``gpu.json`` as Markdown: a table of parts, one of each part's figures, and the failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_summary(report: Mapping[str, Any], path: Path) -> None:
    """Write it to a file."""
    path.write_text("\n".join(_lines(report)) + "\n")


def _lines(report: Mapping[str, Any]) -> list[str]:
    parts = report["parts"]
    lines = [f"# GPU check, {report['date']}", ""]
    if report["miniature"]:
        lines += ["In miniature on the CPU: figures say that the parts run, nothing else.", ""]
    lines += ["| part | status | seconds | limit | failures |", "|---|---|---|---|---|"]
    for name, part in parts.items():
        took, limit = part.get("seconds", ""), part.get("limit_s", "")
        lines.append(f"| {name} | {part['status']} | {took} | {limit} | {len(part['failures'])} |")
    for name, part in parts.items():
        lines += ["", f"## {name}", ""]
        lines += _figures(part["figures"])
        for what, text in part["failures"].items():
            lines += ["", f"**{what}**", "", "```", text.strip(), "```"]
        if part["status"] != "ok" and part.get("output_end"):
            lines += ["", "End of the output:", "", "```", *part["output_end"], "```"]
    return lines


def _figures(figures: Mapping[str, Any]) -> list[str]:
    """Single figures as a list; those with the same columns as one table."""
    lines = [f"- {name}: {_text(value)}" for name, value in figures.items() if not isinstance(value, dict)]
    tables: dict[tuple[str, ...], list[str]] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            tables.setdefault(tuple(value), []).append(name)
    for columns, names in tables.items():
        lines += ["", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {name} | " + " | ".join(_text(figures[name][column]) for column in columns) + " |" for name in names
        ]
    return lines


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", "<br>")
