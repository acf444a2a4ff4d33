"""The page of ``nemorl compare hindsight --html``: the table, and bars of each variant's cosine and norm."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl_insight.diff.hindsight_command import COLUMNS, cells, sentence

if TYPE_CHECKING:
    from nemorl_insight.diff.gradients import Compared
    from nemorl_insight.diff.hindsight import Hindsight

ROW = 24
"""Height of a bar with its gap, in pixels."""
LABELS, HALF = 260, 200
"""Widths of the labels, and of a bar of cosine 1, in pixels."""
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "td,th{padding:.2em .8em;text-align:right}td:first-child,th:first-child{text-align:left}"
    "svg{font:13px system-ui,sans-serif}"
)


def page(run: Path, step: int, found: Hindsight, notes: Sequence[str]) -> str:
    """One HTML file that needs no other."""
    head = "".join(f"<th>{escape(name.capitalize())}</th>" for name in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(row))}</tr>" for row in found.rows)
    told = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Hindsight, step {step}</title>'
        f"<style>{STYLE}</style><h1>Hindsight</h1><p>{escape(sentence(run, step, found))}</p>{plot(found.rows)}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{told}</html>\n"
    )


def plot(rows: Sequence[Compared]) -> str:
    """Bars of the cosine to the run's own gradient, from -1 to 1."""
    zero, height = LABELS + HALF, ROW * (len(rows) + 1)
    parts = [f'<text x="{zero}" y="14" text-anchor="middle">cosine to the run\'s own gradient</text>']
    for place, row in enumerate(rows, start=1):
        value, top = row.cosine or 0.0, ROW * place
        left, width = zero + min(0.0, value) * HALF, abs(value) * HALF
        colour = "#2a7" if value >= 0 else "#c43"
        parts.append(f'<text x="{LABELS - 8}" y="{top + 15}" text-anchor="end">{escape(row.name)}</text>')
        parts.append(f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{ROW - 8}" fill="{colour}"/>')
    parts.append(f'<line x1="{zero}" x2="{zero}" y1="{ROW}" y2="{height}" stroke="#888"/>')
    label = "Cosine of each variant's gradient to the run's own"
    return f'<svg role="img" aria-label="{label}" width="{zero + HALF + 10}" height="{height}">{"".join(parts)}</svg>'
