"""The parts of a page as plain data. Text stays as the run wrote it: the page shows it as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nemorl_rl.alerts.alert import EVENT

from nemorl_cli.report.declared import UNDECLARED, Declarations
from nemorl_cli.report.records.picking import prompt_items, prompt_key
from nemorl_cli.report.run_data import (
    THROUGHPUT_NAMES,
    RunData,
    clip,
    clock_time,
    flatten,
    is_number,
    is_warning,
    local_time,
    number,
    words,
)

MAX_PROMPTS = 8
MAX_EVENTS = 200


class Tile(NamedTuple):
    """A headline number."""

    label: str
    value: str
    note: str = ""


def header(run: RunData, declarations: Declarations) -> dict[str, Any]:
    """Status, algorithm, model, versions and headline numbers."""
    facts = {
        "status": run.status,
        "algorithm": run.algorithm,
        "model": run.model,
        "versions": list(run.versions.items()),
    }
    return {"facts": facts, "tiles": [tile._asdict() for tile in tiles(run, declarations)]}


def tiles(run: RunData, declarations: Declarations) -> list[Tile]:
    """Headline numbers."""
    made: list[Tile] = []
    ranked = run.metrics.get(declarations.best, {})
    if ranked:
        info = declarations.metrics.get(declarations.best, UNDECLARED)
        title = info.title or declarations.best
        if declarations.best.startswith("validation/") and not title.startswith("Validation"):
            title = f"Validation {title.lower()}"
        said = "{:.1%}".format if info.unit == "share" else number
        start, pick = min(ranked), max if declarations.best_is_highest else min
        best = pick(ranked, key=lambda step: ranked[step])
        made.append(Tile(title, said(ranked[max(ranked)]), f"{said(ranked[start])} at step {start}"))
        made.append(Tile(f"Best {title.lower()}", said(ranked[best]), f"at step {best}"))
    name = "train/reward" if run.metrics.get("train/reward") else "train/loss"
    if values := run.metrics.get(name):
        label = f"Last {name.partition('/')[2]}"
        made.append(Tile(label, number(run.last(name)), f"{number(values[min(values)])} at step {min(values)}"))
    if speeds := next((values for name in THROUGHPUT_NAMES if (values := run.metrics.get(name))), None):
        made.append(Tile("Tokens per second", number(_mean(list(speeds.values()))), "mean of steps"))
    planned = f"of {run.max_steps:,} planned" if run.max_steps else ""
    made.append(Tile("Steps", f"{run.last_step:,}", planned))
    made.append(Tile("Duration", clock_time(run.duration_s), f"since {run.started}" if run.started else ""))
    return made


def samples(run: RunData) -> dict[str, Any]:
    """The same prompts early and late; validation prompts where there are any."""
    pairs, split = sample_pairs(run)
    rewards = [pick["reward"] for pair in pairs for pick in pair if is_number(pick.get("reward"))]
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    before = [early.get("reward") for early, _ in pairs if is_number(early.get("reward"))]
    after = [late.get("reward") for _, late in pairs if is_number(late.get("reward"))]
    means = f"Mean reward {number(_mean(before))} → {number(_mean(after))} over {len(pairs)} {split} prompts"
    return {"summary": means, "pairs": [_pair(early, late, low, high) for early, late in pairs[:MAX_PROMPTS]]}


def sample_pairs(run: RunData) -> tuple[list[tuple[Mapping[str, Any], Mapping[str, Any]]], str]:
    """(earliest, latest) sample of each prompt, and the split they come from."""
    for split in ("validation", "train"):
        first: dict[tuple[str, ...], Mapping[str, Any]] = {}
        last: dict[tuple[str, ...], Mapping[str, Any]] = {}
        for sample in run.samples:
            if sample.get("split") == split and is_number(sample.get("step")):
                key = prompt_key(sample)
                if key not in first or sample["step"] < first[key]["step"]:
                    first[key] = sample
                if key not in last or sample["step"] > last[key]["step"]:
                    last[key] = sample
        if first:
            return [(first[key], last[key]) for key in first], split
    return [], ""


def metrics_rows(run: RunData, declarations: Declarations) -> list[dict[str, str]]:
    """Every metric: its meaning, its curve in miniature, last value and range."""
    rows = []
    groups = declarations.grouped(list(run.metrics))
    meanings = {name: info.meaning.replace("`", "") for infos in groups.values() for name, info in infos.items()}
    for name, values in sorted(run.metrics.items()):
        points = list(values.values())
        rows.append(
            {
                "name": name,
                "meaning": meanings[name],
                "line": sparkline(points),
                "last": number(points[-1]),
                "min": number(min(points)),
                "max": number(max(points)),
                "step": str(next(reversed(values))),
            }
        )
    return rows


def sparkline(values: Sequence[float], width: int = 90, height: int = 20) -> str:
    """The points of a curve as SVG's ``polyline`` wants them; of fewer than two values, none."""
    points = values[:: max(1, len(values) // 60)]
    if len(points) < 2:
        return ""
    low, span = min(points), (max(points) - min(points)) or 1.0
    dx = width / (len(points) - 1)
    return " ".join(f"{i * dx:.1f},{height - 2 - (v - low) / span * (height - 4):.1f}" for i, v in enumerate(points))


def environment_rows(run: RunData) -> list[tuple[str, str]]:
    """``environment.json`` as (path, value)."""
    return [(path, words(value)) for path, value in flatten(run.environment)]


def events(run: RunData) -> dict[str, Any]:
    """Events by time; warnings marked."""
    rows = [
        {
            "when": local_time(event.get("time"), "%H:%M:%S"),
            "event": event.get("event", ""),
            "details": _details(event),
            "warns": is_warning(event),
        }
        for event in run.events[-MAX_EVENTS:]
    ]
    warnings = len(run.warnings())
    title = "Events" + (f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else "")
    return {"title": title, "rows": rows, "hidden": len(run.events) - len(rows), "warnings": warnings}


def _details(event: Mapping[str, Any]) -> str:
    """Of an alert what it says, of another event its facts."""
    if event.get("event") == EVENT:
        return f"{event.get('rule')}: {event.get('text')}"
    return "  ".join(
        f"{key}={value}" for key, value in event.items() if key not in ("time", "event") and value is not None
    )


def _mean(values: Sequence[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def _pair(early: Mapping[str, Any], late: Mapping[str, Any], low: float, high: float) -> dict[str, Any]:
    sides = [_sample(pick, low, high) for pick in ([early] if early is late else [early, late])]
    shown = [{"digest": item["digest"], "kind": item["kind"]} for item in prompt_items(early)]
    return {"prompt": clip(early.get("prompt")), "answer": early.get("answer"), "media": shown, "sides": sides}


def _sample(sample: Mapping[str, Any], low: float, high: float) -> dict[str, Any]:
    reward, level = sample.get("reward"), 0
    if isinstance(reward, int | float) and is_number(reward):
        level = round(4 * (reward / 2 - low / 2) / (high / 2 - low / 2))  # halves: a difference of extremes overflows
    finish, tokens = sample.get("finish_reason"), sample.get("tokens")
    notes = [f"{tokens} tokens" if tokens is not None else "", "cut by the limit" if finish == "length" else ""]
    return {
        "level": level,
        "step": sample.get("step"),
        "reward": number(float(reward)) if isinstance(reward, int | float) else "–",
        "about": " · ".join(note for note in notes if note),
        "response": clip(sample.get("response")),
    }
