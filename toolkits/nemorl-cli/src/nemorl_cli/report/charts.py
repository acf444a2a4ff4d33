"""The curves of a run as plain data, which the page draws."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.metrics import MetricInfo

from nemorl_cli.report.declared import Declarations
from nemorl_cli.report.run_data import RunData, clock_time, is_number, number

MAX_POINTS = 1500
"""Points drawn per curve; longer runs are thinned evenly, the last point kept."""

UNITS = ("gib", "mib", "bytes")
"""Last words of names that the chart's unit says."""
_DOT = re.compile(r"\.(?=[a-z])|(?<=[a-z])\.")
"""A dot of a name that is none of a number."""
EFFICIENCY = ("performance/", "system/")
"""Metrics of the section on efficiency begin with one of these."""
MAX_CURVES = 8
"""Of one chart, as many as page.css has colours; of more, every k-th is drawn."""
MAX_CHARTS = 60


@dataclass(frozen=True)
class Cards:
    """The charts of a run, as the page draws them."""

    moving: list[dict[str, Any]]
    still: list[dict[str, Any]]
    """Of metrics that kept one value throughout."""
    left_out: int
    """Charts beyond ``MAX_CHARTS``."""

    @property
    def constants(self) -> str:
        """The curves of ``still`` in words."""
        told = []
        for card in self.still:
            for line in card["series"]:
                name = card["title"] if len(card["series"]) == 1 else f"{card['title']}, {line['label']}"
                told.append(f"{name} {number(_known(line)[0])}")
        return "; ".join(told)


def cards(run: RunData, declarations: Declarations, folders: tuple[str, ...] = ()) -> Cards:
    """Per chart the steps and one list of values (None: not measured) per curve.

    Metrics of one title and unit share a chart. Those of time and of efficiency have sections of their own.

    Args:
        run: Its metrics.
        declarations: Titles and units.
        folders: Begin of the names to draw. Empty: all that have no section of their own.
    """
    names = [name for name in run.metrics if _is_shown(name, folders)]
    groups = declarations.grouped(names)
    found = [_declared_card(run, title, unit, infos) for (title, unit), infos in list(groups.items())[:MAX_CHARTS]]
    still = [card for card in found if _is_still(card)]
    return Cards([card for card in found if card not in still], still, max(0, len(groups) - MAX_CHARTS))


def _is_shown(name: str, folders: tuple[str, ...]) -> bool:
    return name.startswith(folders) if folders else not name.startswith(("timing/", *EFFICIENCY))


def _declared_card(run: RunData, title: str, unit: str, infos: Mapping[str, MetricInfo]) -> dict[str, Any]:
    stride = -(-len(infos) // MAX_CURVES)
    shown = list(infos)[::-1][::stride][::-1]
    names = {_label(name, shown): name for name in shown}
    curves = {label: run.metrics[name] for label, name in names.items()}
    drawn = {_label(name, shown): infos[name] for name in shown}
    meaning, *notes = _told({label: info.meaning for label, info in drawn.items()})
    if len(shown) < len(infos):
        notes.append(f"{len(shown)} of {len(infos)} curves are drawn")
    watch_for = "; ".join(filter(None, _told({label: info.watch_for for label, info in drawn.items()})))
    smooth = any(info.smooth for info in infos.values())
    made = card(title, curves, unit=unit, meaning=meaning, notes=notes, watch_for=watch_for, smooth=smooth)
    for line in made["series"]:
        line["metric"] = names[line["label"]]
    return made


def _told(texts: Mapping[str, str]) -> list[str]:
    """The text that all curves share, else none and then each with the labels that it is about."""
    labels: dict[str, list[str]] = {}
    for label, text in texts.items():
        labels.setdefault(text, []).append(label)
    if len(labels) == 1:
        return list(labels)
    return ["", *(f"{', '.join(of)}: {text}" for text, of in labels.items() if text)]


def card(
    title: str,
    curves: Mapping[str, Mapping[int, float]],
    *,
    unit: str = "",
    meaning: str = "",
    notes: Sequence[str] = (),
    watch_for: str = "",
    smooth: bool = False,
) -> dict[str, Any]:
    """One chart: label -> step -> value, thinned and rounded."""
    return {
        "title": title,
        "unit": unit,
        "meaning": meaning.replace("`", ""),
        "notes": [note.replace("`", "") for note in notes],
        "watch_for": watch_for.replace("`", ""),
        "smooth": smooth,
        "alerts": [],
        **_columns(curves),
    }


def _known(line: Mapping[str, Any]) -> list[float]:
    return [value for value in line["values"] if value is not None]


def _is_still(card: Mapping[str, Any]) -> bool:
    lines = [_known(line) for line in card["series"]]
    return all(len(set(line)) == 1 for line in lines) and any(len(line) > 1 for line in lines)


def _label(name: str, names: Sequence[str]) -> str:
    """Short enough for a legend: without the path that all curves of the chart share."""
    folders = [other.split("/")[:-1] for other in names]
    shared = 0
    while all(len(folder) > shared and folder[shared] == folders[0][shared] for folder in folders):
        shared += 1
    words = _DOT.sub(" ", " ".join(name.split("/")[shared:])).replace("_", " ").split(" ")
    kept = words[:-1] if len(words) > 1 and words[-1] in UNITS else words
    return " ".join("memory" if word == "mem" else word for word in kept)


def timing_chart(run: RunData) -> dict[str, Any] | None:
    """Seconds per step by phase, for the stacked chart."""
    phases = _phases(run)
    if not phases:
        return None
    steps = sorted({step for values in phases.values() for step in values})
    kept = _thin(steps)
    series = [
        {"label": name.replace("_", " "), "values": [_short(values.get(step, 0.0)) for step in kept]}
        for name, values in phases.items()
    ]
    told = {"title": "Seconds per step", "unit": "seconds", "meaning": "stacked by phase", "notes": [], "watch_for": ""}
    return {**told, "smooth": False, "alerts": [], "steps": kept, "series": series, "stacked": True}


def time_shares(run: RunData) -> dict[str, Any]:
    """Share of each phase in all steps together."""
    totals = {name: sum(values.values()) for name, values in _phases(run).items()}
    whole = sum(totals.values())
    steps = len(run.metrics.get("timing/train/total_step_time") or next(iter(_phases(run).values()), ())) or 1
    phases = [
        {
            "name": phase.replace("_", " "),
            "width": f"{100 * seconds / whole:.2f}",
            "percent": f"{seconds / whole:.0%}",
            "share": f"{seconds / whole:.1%}",
            "mean_s": number(seconds / steps),
        }
        for phase, seconds in totals.items()
        if whole
    ]
    validation_s = sum(run.metrics.get("timing/validation/total_validation_time", {}).values())
    return {"phases": phases, "validation": clock_time(validation_s) if validation_s else ""}


def _columns(curves: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    # Thinned one by one: validation every 10 steps must survive beside a curve that keeps every 7th.
    finite = {label: {step: v for step, v in curve.items() if is_number(v)} for label, curve in curves.items()}
    kept = {label: set(_thin(sorted(curve))) for label, curve in finite.items()}
    steps = sorted(set().union(*kept.values()))
    series = [
        {"label": label, "values": [_short(curve[step]) if step in kept[label] else None for step in steps]}
        for label, curve in finite.items()
    ]
    return {"steps": steps, "series": series}


def _thin(steps: list[int]) -> list[int]:
    """Every k-th step, counted from the last, so that at most ``MAX_POINTS`` remain."""
    stride = -(-len(steps) // MAX_POINTS) or 1
    return steps[::-1][::stride][::-1]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _phases(run: RunData) -> dict[str, dict[int, float]]:
    """Seconds per outer phase and step. What the phases leave of ``total_step_time`` is the phase ``other``."""
    phases: dict[str, dict[int, float]] = {}
    for name, values in run.metrics.items():
        phase = name.removeprefix("timing/train/").removesuffix("/total")
        is_outer = name.startswith("timing/train/") and "/" not in phase
        if is_outer and phase != "total_step_time" and "per_sec" not in phase:
            phases[phase] = values
    total = run.metrics.get("timing/train/total_step_time", {})
    other = {step: max(0.0, s - sum(phase.get(step, 0.0) for phase in phases.values())) for step, s in total.items()}
    if sum(other.values()) > 0.005 * sum(total.values()):
        phases["other"] = other
    return phases
