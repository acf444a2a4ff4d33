"""The curves of a report as plain data, which report.js draws."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl_report.run_data import RunData, clock_time, is_number
from nemorl_report.words import number

MAX_POINTS = 1500
"""Points drawn per curve; longer runs are thinned evenly, the last point kept."""
COLOURS = 8
"""Colours of the palette in report.css."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One card of curves: which metrics share an axis, and what they mean."""

    title: str
    pattern: str
    """Full-match regular expression over metric names."""
    hint: str
    smooth: bool = False
    """Noisy per step: draw a moving average over the faint raw curve."""


CHARTS = (
    Chart("Reward", "train/reward", "mean over the samples of a step", smooth=True),
    Chart("Validation accuracy", r"validation/(accuracy|(pass|cons)[@_]?(at_)?\w+)", "held-out prompts"),
    Chart("Loss", r"train/loss|validation/(val_)?loss", "the training objective", smooth=True),
    Chart(
        "Preferred and rejected", r"train/rewards_(chosen|rejected)_mean", "mean reward of each of a pair", smooth=True
    ),
    Chart("Critic", "train/critic/explained_var", "share of the returns' variance that it foresees", smooth=True),
    Chart("Critic loss", "train/critic/loss", "half the squared error of its values", smooth=True),
    Chart("Distance to the teacher", "validation/reverse_kl", "nats per token, 0 is the teacher itself"),
    Chart("KL to the reference", "train/kl_penalty", "nats per token, how far the policy has moved", smooth=True),
    Chart("Sampler mismatch", r"train/token_mult_prob_error", "exp |training − generation log-prob|, 1 is exact"),
    Chart("Entropy", "train/approx_entropy", "nats per token, near 0 means no exploration left", smooth=True),
    Chart("Response length", r"train/mean_gen_tokens_per_sample|validation/avg_length", "tokens", smooth=True),
    Chart("Truncated responses", "train/truncation_rate", "fraction cut by the token limit", smooth=True),
    Chart("Policy ratio", r"train/probs_ratio(_min|_max)?", "new over old probability per token"),
    Chart("Gradient norm", "train/grad_norm", "before clipping", smooth=True),
    Chart("Learning rate", "train/lr", "of the last optimizer step"),
    Chart("Throughput", r"performance/(generation_|policy_training_)?tokens_per_sec(_per_gpu)?", "tokens per second"),
)


def cards(run: RunData) -> list[dict[str, Any]]:
    """What report.js draws: per card the steps and one list of values (None: not measured) per curve."""
    found = []
    for chart in CHARTS:
        names = sorted(name for name in run.metrics if re.fullmatch(chart.pattern, name))
        if names:
            curves = {_label(name, names): run.metrics[name] for name in names}
            found.append(card(chart.title, curves, meaning=chart.hint, smooth=chart.smooth))
    return found


def card(
    title: str, curves: Mapping[str, Mapping[int, float]], *, meaning: str = "", smooth: bool = False
) -> dict[str, Any]:
    """One chart for report.js: label -> step -> value, thinned and rounded."""
    return {"title": title, "hint": meaning, "smooth": smooth, **_columns(curves)}


def _label(name: str, names: Sequence[str]) -> str:
    """Short enough for a legend: without the prefix where all curves of the chart share it."""
    is_shared = len({other.partition("/")[0] for other in names}) == 1
    return (name.partition("/")[2] if is_shared else name.replace("/", " ")).replace("_", " ")


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
    return {"title": "Seconds per step", "hint": "stacked by phase", "steps": kept, "series": series, "stacked": True}


def time_shares(run: RunData) -> dict[str, Any]:
    """Share of each phase in all steps together."""
    totals = {name: sum(values.values()) for name, values in _phases(run).items()}
    whole = sum(totals.values())
    steps = len(run.metrics.get("timing/train/total_step_time") or next(iter(_phases(run).values()), ())) or 1
    phases = [
        {
            "name": phase.replace("_", " "),
            "colour": index % COLOURS + 1,
            "width": f"{100 * seconds / whole:.2f}",
            "percent": f"{seconds / whole:.0%}",
            "share": f"{seconds / whole:.1%}",
            "mean_s": number(seconds / steps),
        }
        for index, (phase, seconds) in enumerate(totals.items())
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
