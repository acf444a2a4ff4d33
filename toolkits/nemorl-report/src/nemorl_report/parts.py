"""The parts of a report as HTML text. Everything that a run wrote passes through :func:`esc` on its way in.

Charts are drawn in the browser from the JSON that :func:`charts` prepares; all else is readable without scripts.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.metrics import THROUGHPUT_NAMES

from nemorl_report.run_data import RunData, clock_time, flatten, is_number, is_warning, local_time

MAX_POINTS = 1500
"""Points drawn per curve; longer runs are thinned evenly, the last point kept."""
MAX_PROMPTS = 8
MAX_CHARACTERS = 3000
"""Of one response; the rest is counted, not shown."""
MAX_EVENTS = 200
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


def esc(value: Any) -> str:
    return html.escape(str(value), quote=True)


def number(value: float | None) -> str:
    """Four significant digits, thousands separated."""
    if value is None:
        return "–"
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def tile(label: str, value: str, note: str = "") -> str:
    small = f'<div class="note">{esc(note)}</div>' if note else ""
    return f'<div class="tile"><div class="label">{esc(label)}</div><div class="value">{esc(value)}</div>{small}</div>'


def tiles(run: RunData) -> str:
    """Headline numbers."""
    made: list[str] = []
    if accuracy := run.metrics.get("validation/accuracy"):
        start, best = min(accuracy), max(accuracy, key=lambda step: accuracy[step])
        last = f"{accuracy[max(accuracy)]:.1%}"
        made.append(tile("Validation accuracy", last, f"{accuracy[start]:.1%} at step {start}"))
        made.append(tile("Best accuracy", f"{accuracy[best]:.1%}", f"at step {best}"))
    for name in ("validation/val_loss", "validation/loss"):
        if losses := run.metrics.get(name):
            best = min(losses, key=lambda step: losses[step])
            made.append(tile("Validation loss", number(run.last(name)), f"best {number(losses[best])} at step {best}"))
    name = "train/reward" if run.metrics.get("train/reward") else "train/loss"
    if values := run.metrics.get(name):
        label = f"Last {name.partition('/')[2]}"
        made.append(tile(label, number(run.last(name)), f"{number(values[min(values)])} at step {min(values)}"))
    if speeds := next((values for name in THROUGHPUT_NAMES if (values := run.metrics.get(name))), None):
        made.append(tile("Tokens per second", number(_mean(list(speeds.values()))), "mean of steps"))
    planned = f"of {run.max_steps:,} planned" if run.max_steps else ""
    made.append(tile("Steps", f"{run.last_step:,}", planned))
    made.append(tile("Duration", clock_time(run.duration_s), f"since {run.started}" if run.started else ""))
    return "".join(made)


def facts(run: RunData) -> str:
    """Status, algorithm, model and versions."""
    versions = "".join(f"<span>{esc(name)} {esc(version)}</span>" for name, version in run.versions.items())
    return (
        f'<div class="facts"><span class="status {esc(run.status)}">{esc(run.status)}</span>'
        f"<b>{esc(run.algorithm)}</b><span>{esc(run.model)}</span>{versions}</div>"
    )


def charts(run: RunData) -> list[dict[str, Any]]:
    """What report.js draws: per card the steps and one list of values (None: not measured) per curve."""
    cards = []
    for chart in CHARTS:
        names = sorted(name for name in run.metrics if re.fullmatch(chart.pattern, name))
        if names:
            curves = {_label(name, names): run.metrics[name] for name in names}
            cards.append(chart_card(chart.title, chart.hint, chart.smooth, curves))
    return cards


def chart_card(title: str, hint: str, smooth: bool, curves: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """One chart for report.js: label -> step -> value, thinned and rounded."""
    return {"title": title, "hint": hint, "smooth": smooth, **_columns(curves)}


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of texts and numbers."""
    head = "".join(f"<th>{esc(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="plain"><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return number(float(value)) if is_number(value) else esc(value)


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


def timing_bar(run: RunData) -> str:
    """Share of each phase in all steps together."""
    totals = {name: sum(values.values()) for name, values in _phases(run).items()}
    whole = sum(totals.values())
    if not whole:
        return '<p class="empty">No step times were recorded.</p>'
    steps = max(1, len(run.metrics.get("timing/train/total_step_time") or next(iter(_phases(run).values()))))
    bar, rows = [], []
    for index, (phase, seconds) in enumerate(totals.items()):
        colour, words = f"c{index % COLOURS + 1}", esc(phase.replace("_", " "))
        bar.append(
            f'<i class="{colour}" style="width:{100 * seconds / whole:.2f}%" title="{words} {seconds / whole:.0%}"></i>'
        )
        rows.append(
            f'<tr><td><i class="dot {colour}"></i>{words}</td><td>{seconds / whole:.1%}</td>'
            f"<td>{number(seconds / steps)} s</td></tr>"
        )
    validation_s = sum(run.metrics.get("timing/validation/total_validation_time", {}).values())
    extra = f'<p class="empty">Validation took {clock_time(validation_s)} besides.</p>' if validation_s else ""
    head = "<tr><th>Phase</th><th>Share</th><th>Mean per step</th></tr>"
    return f'<div class="bar">{"".join(bar)}</div><table class="timing">{head}{"".join(rows)}</table>{extra}'


def samples(run: RunData) -> str:
    """The same prompts early and late; validation prompts where there are any."""
    pairs, split = sample_pairs(run)
    if not pairs:
        return '<p class="empty">No samples were recorded.</p>'
    rewards = [pick["reward"] for pair in pairs for pick in pair if is_number(pick.get("reward"))]
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    before = [early.get("reward") for early, _ in pairs if is_number(early.get("reward"))]
    after = [late.get("reward") for _, late in pairs if is_number(late.get("reward"))]
    means = f"Mean reward {number(_mean(before))} → {number(_mean(after))} over {len(pairs)} {split} prompts"
    shown = pairs[:MAX_PROMPTS]
    intro = f'<p class="empty">{esc(means)}; the first {len(shown)} are shown, in the order they were recorded.</p>'
    return intro + "".join(_pair(early, late, low, high) for early, late in shown)


def sample_pairs(run: RunData) -> tuple[list[tuple[Mapping[str, Any], Mapping[str, Any]]], str]:
    """(earliest, latest) sample of each prompt, and the split they come from."""
    for split in ("validation", "train"):
        first: dict[tuple[Any, Any], Mapping[str, Any]] = {}
        last: dict[tuple[Any, Any], Mapping[str, Any]] = {}
        for sample in run.samples:
            if sample.get("split") == split and is_number(sample.get("step")):
                key = (str(sample.get("prompt")), str(sample.get("answer")))
                if key not in first or sample["step"] < first[key]["step"]:
                    first[key] = sample
                if key not in last or sample["step"] > last[key]["step"]:
                    last[key] = sample
        if first:
            return [(first[key], last[key]) for key in first], split
    return [], ""


def metrics_table(run: RunData) -> str:
    """Every metric: its curve in miniature, last value and range."""
    if not run.metrics:
        return '<p class="empty">No metrics were recorded.</p>'
    rows = []
    for name, values in sorted(run.metrics.items()):
        points = list(values.values())
        cells = (number(points[-1]), number(min(points)), number(max(points)), str(next(reversed(values))))
        rows.append(
            f"<tr><td><code>{esc(name)}</code></td><td>{sparkline(points)}</td>"
            + "".join(f"<td>{c}</td>" for c in cells)
            + "</tr>"
        )
    head = "<tr><th>Metric</th><th></th><th>Last</th><th>Min</th><th>Max</th><th>Step</th></tr>"
    return f'<div class="scroll"><table class="metrics">{head}{"".join(rows)}</table></div>'


def sparkline(values: Sequence[float], width: int = 90, height: int = 20) -> str:
    """A curve as inline SVG, without axes."""
    points = values[:: max(1, len(values) // 60)]
    if len(points) < 2:
        return ""
    low, span = min(points), (max(points) - min(points)) or 1.0
    dx = width / (len(points) - 1)
    path = " ".join(f"{i * dx:.1f},{height - 2 - (v - low) / span * (height - 4):.1f}" for i, v in enumerate(points))
    return f'<svg class="spark" width="{width}" height="{height}" aria-hidden="true"><polyline points="{path}"/></svg>'


def config(run: RunData) -> str:
    """``config.yaml`` as it stands, keys coloured, and the environment below."""
    lines = [
        re.sub(r"^(\s*(?:- )?)([\w.@/-]+)(:)", r"\1<b>\2</b>\3", esc(line)) for line in run.config_text.splitlines()
    ]
    text = f'<pre class="code">{chr(10).join(lines)}</pre>' if lines else '<p class="empty">No config was recorded.</p>'
    rows = "".join(
        f"<tr><td><code>{esc(path)}</code></td><td>{esc(_words(value))}</td></tr>"
        for path, value in flatten(run.environment)
    )
    table = f'<div class="scroll"><table class="plain">{rows}</table></div>'
    return text + (f"<details><summary>Environment</summary>{table}</details>" if rows else "")


def events(run: RunData) -> str:
    """What happened when; warnings marked."""
    if not run.events:
        return '<p class="empty">No events were recorded.</p>'
    rows = []
    for event in run.events[-MAX_EVENTS:]:
        when = local_time(event.get("time"), "%H:%M:%S")
        details = "  ".join(f"{key}={value}" for key, value in event.items() if key not in ("time", "event"))
        mark = ' class="warning"' if is_warning(event) else ""
        rows.append(f"<tr{mark}><td>{when}</td><td>{esc(event.get('event', ''))}</td><td>{esc(details)}</td></tr>")
    hidden = len(run.events) - len(rows)
    note = f'<p class="empty">{hidden} earlier events are in events.jsonl.</p>' if hidden else ""
    return f'{note}<div class="scroll"><table class="plain">{"".join(rows)}</table></div>'


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


def _mean(values: Sequence[Any]) -> float | None:
    return sum(values) / len(values) if values else None


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


def _pair(early: Mapping[str, Any], late: Mapping[str, Any], low: float, high: float) -> str:
    answer = early.get("answer")
    expected = f'<div class="answer">expected <code>{esc(answer)}</code></div>' if answer is not None else ""
    cards = [_sample(pick, low, high) for pick in ([early] if early is late else [early, late])]
    prompt = f'<div class="prompt">{esc(_clip(early.get("prompt")))}</div>'
    return f'<article class="pair">{prompt}{expected}<div class="sides">{"".join(cards)}</div></article>'


def _sample(sample: Mapping[str, Any], low: float, high: float) -> str:
    reward = sample.get("reward")
    level = round(4 * (reward - low) / (high - low)) if isinstance(reward, int | float) and is_number(reward) else 0
    finish, tokens = sample.get("finish_reason"), sample.get("tokens")
    notes = [f"{tokens} tokens" if tokens is not None else "", "cut by the limit" if finish == "length" else ""]
    about = esc(" · ".join(note for note in notes if note))
    shown = number(float(reward)) if isinstance(reward, int | float) else "–"
    return (
        f'<div class="sample r{level}"><div class="about"><b>step {esc(sample.get("step"))}</b>'
        f'<span class="reward">reward {shown}</span><span>{about}</span></div>'
        f'<div class="response">{esc(_clip(sample.get("response")))}</div></div>'
    )


def _words(value: Any) -> str:
    """A leaf of ``environment.json``: lists as words, records by their values."""
    if isinstance(value, Mapping):
        return " ".join(str(item) for item in value.values())
    return ", ".join(_words(item) for item in value) if isinstance(value, list) else str(value)


def _clip(value: Any) -> str:
    text = "" if value is None else str(value)
    more = len(text) - MAX_CHARACTERS
    return text if more <= 0 else f"{text[:MAX_CHARACTERS]}… ({more:,} more characters)"
