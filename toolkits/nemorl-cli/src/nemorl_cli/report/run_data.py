"""A run directory, read for people: everything in it may be missing, partial or cut, and reading never fails.

``RunData`` holds what was found; questions such as "how long" and "did it finish" are answered from the records.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import loading
from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.text.reading import parse_json
from nemorl.errors import UsageError
from nemorl.types import BEGINNINGS, ENDINGS

from nemorl_cli.report.records.reading import RunRecords

WARNING_EVENT = re.compile(r"warn|error|fail|skip|timeout|crash|disabled|non_?finite|truncat|alert$", re.IGNORECASE)
MOST_NAMED = 5
"""Runs in the message about a folder that is none."""
VERSION_KEYS = ("nemorl", "nemorl-core", "python", "torch", "transformers", "vllm", "ray")

THROUGHPUT_NAMES = (
    "performance/tokens_per_sec",
    "performance/generation_tokens_per_sec",
    "performance/training_worker_group_tokens_per_sec",
    "performance/tokens_per_sec_per_gpu",
)
"""Metrics of speed, the one that says most first."""


@dataclass(frozen=True, slots=True)
class RunData:
    """The records of a run, as it left them.

    Example:
        >>> RunData.load(Path("no/such/run")).last("train/reward") is None
        True
    """

    name: str
    """Of its directory."""
    config_text: str = ""
    """``config.yaml`` as it stands."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """``config.yaml`` as data."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """``environment.json``: versions, plugins, git state."""
    metrics: Mapping[str, dict[int, float]] = field(default_factory=dict)
    """Metric name -> step -> value, steps ascending; only finite numbers."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Rollout records without their tokens, in order of steps: step, split, prompt, response, reward, …"""
    events: tuple[Mapping[str, Any], ...] = ()
    """Records of ``events.jsonl``: time, event, and facts about it."""
    times: tuple[float, ...] = ()
    """Epoch seconds of all metric lines and events."""

    @classmethod
    def load(cls, run_dir: Path) -> RunData:
        """Read whatever is there."""
        from nemorl.base.text.yaml_text import parse_yaml

        run_dir = Path(run_dir)
        config_text = _text(run_dir / "config.yaml")
        records = list(read_jsonl(run_dir / "metrics.jsonl"))
        events = tuple(read_jsonl(run_dir / "events.jsonl"))
        return cls(
            name=run_dir.resolve().name,
            config_text=config_text,
            config=_mapping(config_text, parse_yaml),
            environment=_mapping(_text(run_dir / "environment.json"), parse_json),
            metrics=_series(records),
            samples=RunRecords(run_dir),
            events=events,
            times=tuple(sorted(line["time"] for line in (*records, *events) if is_number(line.get("time")))),
        )

    def last(self, *names: str) -> float | None:
        """The latest value of the first of ``names`` that has any."""
        return next((list(self.metrics[name].values())[-1] for name in names if self.metrics.get(name)), None)

    @property
    def last_step(self) -> int:
        return max((step for values in self.metrics.values() for step in values), default=0)

    @property
    def max_steps(self) -> int | None:
        planned = self.config.get("max_steps")
        return planned if isinstance(planned, int) else None

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm") or "unknown algorithm")

    @property
    def model(self) -> str:
        policy = self.config.get("policy")
        name = self.config.get("model") or (policy.get("model_name") if isinstance(policy, Mapping) else None)
        return str(name or "unknown model")

    @property
    def duration_s(self) -> float:
        """From the first record to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    @property
    def started(self) -> str:
        return local_time(self.times[0], "%Y-%m-%d %H:%M") if self.times else ""

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed`` or ``incomplete``, by the last event about the run as a whole."""
        for event in reversed(self.events):
            word = str(event.get("event", ""))
            if word in ENDINGS:
                return word
            if word in BEGINNINGS:
                return "incomplete"  # it runs still, or died without a word
        reached_end = self.max_steps is not None and self.last_step >= self.max_steps
        return "finished" if reached_end else "incomplete"

    @property
    def versions(self) -> dict[str, str]:
        """The versions that matter most, wherever ``environment.json`` keeps them."""
        flat: dict[str, str] = {}
        for path, value in flatten(self.environment):
            if value is not None:
                flat.setdefault(path.rpartition(".")[2], str(value))
        return {key: flat[key] for key in VERSION_KEYS if key in flat}

    def warnings(self) -> list[Mapping[str, Any]]:
        """Events that deserve attention."""
        return [event for event in self.events if is_warning(event)]


def is_warning(event: Mapping[str, Any]) -> bool:
    level = str(event.get("level", "")).lower()
    return level in {"warning", "error", "critical"} or bool(WARNING_EVENT.search(str(event.get("event", ""))))


def local_time(epoch_s: Any, form: str) -> str:
    """Text for a recorded time; empty for one that no clock could have shown."""
    try:
        return time.strftime(form, time.localtime(epoch_s)) if is_number(epoch_s) else ""
    except (OverflowError, ValueError, OSError):
        return ""


def clock_time(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_number(value: Any) -> bool:
    """A finite number; JSON's true and false are not."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) pairs; lists are leaves."""
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        else:
            yield path, value


def _series(records: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    series: dict[str, dict[int, float]] = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for name, value in record.items():
            if name not in ("step", "time") and is_number(value):
                series.setdefault(name, {})[step] = float(value)
    return {name: dict(sorted(values.items())) for name, values in series.items()}


def _text(path: Path) -> str:
    with loading(path):
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _mapping(text: str, parse: Any) -> Mapping[str, Any]:
    try:
        parsed = parse(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, Mapping) else {}


def no_run(folder: Path, lacks: str = "config.yaml") -> UsageError:
    """The error of a command that was given a folder which is no run; names the runs in it, as those of the quickstart.

    Args:
        folder: As it was given.
        lacks: What a run has.
    """
    inside = sorted(path.parent for path in folder.glob("*/config.yaml"))[:MOST_NAMED]
    fix = f"give one of the runs in it: {', '.join(map(str, inside))}" if inside else "give the path of a run"
    return UsageError(f"{folder} is not a run directory (no {lacks})", fix=fix)


# Numbers and texts of a run as a report shows them


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
