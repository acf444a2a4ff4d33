"""The display of a run under way: a live panel on a terminal, plain lines elsewhere, or nothing.

Everything goes to stderr; stdout is for results. The only thread is the one rich redraws from, four times a second.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TextIO, cast

from nemorl.base.text.secrets import Redactor
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nemorl_cli.report.run_data import THROUGHPUT_NAMES, clock_time, is_number
from nemorl_cli.streams import steady
from nemorl_cli.terminal import plain, styled

REFRESH_HZ = 4
PLAIN_INTERVAL_S = 2.0
"""Without a terminal, at most one step line per this many seconds."""
HEARTBEAT_S = 10.0
"""Without a panel, longest silence while something runs."""
RECENT_STEPS = 20
"""Steps that the time left is judged by: old enough to be steady, recent enough to follow growing responses."""
MAX_WIDTH = 100
SPARK = "▁▂▃▄▅▆▇█"
SHOWN = (
    ("reward", ("train/reward",), "{:.3f}"),
    ("accuracy", ("validation/accuracy",), "{:.3f}"),
    ("val loss", ("validation/val_loss", "validation/loss"), "{:.4f}"),
    ("loss", ("train/loss",), "{:.4f}"),
    ("tokens/s", THROUGHPUT_NAMES, "{:,.0f}"),
)
"""Columns of a step: label, metric names in order of preference, format."""
SET_ACCURACY = re.compile("validation/[^/]+/accuracy")
MOST_SETS = 3
"""Validation sets whose accuracies are shown one by one; of more, the mean."""


@dataclass
class _Run:
    """Facts about the run on display."""

    title: str = ""
    total: int | None = None
    started: float = 0.0
    phase: str = "starting"
    step: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    best: float | None = None
    """Highest validation accuracy."""
    ends: deque[float] = field(init=False)
    """When the start and the recent steps ended."""
    printed_at: float | None = None
    closed_at: float | None = None

    def __post_init__(self) -> None:
        self.ends = deque([self.started], maxlen=RECENT_STEPS + 1)


class Console:
    """The progress display of a run. It can be started again after ``close``, one stage after another.

    Example:
        >>> with Console(quiet=True) as console:
        ...     console.start("arithmetic", total_steps=2)
        ...     console.step(1, {"train/reward": 0.5})
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        file: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            quiet: Show nothing at all.
            file: Where to write. Unset: stderr.
            live: Draw the panel. Unset: when ``file`` is a terminal that can move its cursor.
            clock: Source of seconds.
        """
        self._quiet = quiet
        # Named as rich names it: of a stream that redirects prints above a panel, the one behind it.
        target = steady(getattr(file or sys.stderr, "rich_proxied_file", file or sys.stderr))
        self._target = target
        is_live = live if live is not None else target.isatty() and os.environ.get("TERM") != "dumb"
        self._wants_live = is_live and not quiet
        # Not rich's own test for a terminal: FORCE_COLOR, common in CI, would turn the panel into a flood of frames.
        self._rich = RichConsole(file=cast(TextIO, target), force_terminal=True if self._wants_live else None)
        self._clock, self._redacted = clock, Redactor()
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._stage = ""
        self._run = _Run(started=clock())
        self._depth = 0
        """Blocks that it is open in, one within the other"""
        self._heartbeat: Heartbeat
        self._spoken_at = self._began_at = clock()
        """When the last line was printed, and when the present phase began."""

    @property
    def is_lost(self) -> bool:
        """Nobody can read this any more: the terminal hung up, or the other end of the pipe is gone."""
        return self._target.is_lost

    def start(self, title: str, total_steps: int | None) -> None:
        """Begin a run of ``total_steps`` (``None``: not known in advance)."""
        self.close()
        self._run = _Run(plain(title), total_steps, started=self._clock())
        if self._quiet:
            return
        if not self._wants_live:
            steps = f", {total_steps} steps" if total_steps is not None else ""
            self._print(" · ".join(part for part in (self._stage, title) if part) + steps)
            return
        # A print() to the same terminal must go above the panel; one into a pipe must stay in the pipe.
        self._live = Live(
            console=self._rich,
            get_renderable=self._render,
            refresh_per_second=REFRESH_HZ,
            redirect_stdout=sys.stdout.isatty(),
        )
        atexit.register(self.close)  # whoever forgets close() on an error still gets the cursor back
        self._live.start()

    def stage(self, name: str) -> None:
        """Name the part of a longer procedure that the next steps belong to, e.g. ``SFT warm-up``."""
        self._stage = plain(name)

    def announce(self, text: str) -> None:
        """Say what begins now, at once: loading takes long, and an empty screen looks like a hang."""
        self._run.phase, self._began_at = text, self._clock()
        self.message(f"{text} …")

    def phase(self, name: str) -> None:
        """Say what is happening now. Cheap: it is drawn with the next frame."""
        if not name.endswith(("total", "total_step_time")):  # phases that only add others up
            if name != self._run.phase:
                self._began_at = self._clock()
            self._run.phase = name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a step. Names as in ``metrics.jsonl``; several calls per step add up."""
        now = self._clock()
        if step != self._run.step:
            self._run.step = step
            self._run.ends.append(now)
        self._run.latest.update(metrics)
        if (reward := metrics.get("train/reward")) is not None and is_number(reward):
            self._run.rewards.append(reward)
        if (accuracy := metrics.get("validation/accuracy")) is not None and not _accuracies(metrics):
            self._run.best = accuracy if self._run.best is None else max(self._run.best, accuracy)
        if self._quiet or self._wants_live:
            return
        is_validation = any(name.startswith("validation/") for name in metrics)
        is_due = (
            self._run.printed_at is None or now - self._run.printed_at >= PLAIN_INTERVAL_S or step == self._run.total
        )
        if is_validation or is_due:
            self._print(self._plain_line(metrics))
            self._run.printed_at = now

    def message(self, text: str) -> None:
        """Print a line that stays, above the panel."""
        if not self._quiet:
            self._print(text)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back. Calling it twice is harmless."""
        live, self._live = self._live, None
        if live is not None:
            self._run.phase = ""
            self._run.closed_at = self._clock()
            live.stop()
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._heartbeat = Heartbeat(self.beat)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._heartbeat.stop()
        self.close()

    def beat(self) -> None:
        """A sign of life where nothing was printed for a while and no panel moves: what runs, and for how long."""
        now = self._clock()
        if self._quiet or self._live is not None or not self._run.phase or now - self._spoken_at < HEARTBEAT_S:
            return
        step = f"step {self._run.step + 1}, " if self._run.title else ""
        self._print(f"… {step}{self._run.phase.replace('_', ' ')} ({clock_time(now - self._began_at)})")

    def _print(self, text: str) -> None:
        self._spoken_at = self._clock()
        self._rich.print(styled(self._redacted(text)), soft_wrap=True)

    # Numbers

    def _shown(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """(label, formatted value) of the headline metrics that are present."""
        pairs = []
        for label, names, form in SHOWN:
            value = next((metrics[name] for name in names if metrics.get(name) is not None), None)
            if value is None:
                continue
            each = _accuracies(metrics) if label == "accuracy" else {}
            said = ", ".join(f"{name} {form.format(part)}" for name, part in each.items())
            pairs.append((label, said or form.format(value)))
        return pairs

    def _elapsed_s(self) -> float:
        return (self._clock() if self._run.closed_at is None else self._run.closed_at) - self._run.started

    def _left_s(self) -> float | None:
        """Remaining steps at the recent pace; None while unknown."""
        if self._run.total is None or len(self._run.ends) < 2 or self._run.step >= self._run.total:
            return None
        pace_s = (self._run.ends[-1] - self._run.ends[0]) / (len(self._run.ends) - 1)
        since_s = self._clock() - self._run.ends[-1]
        return max(0.0, pace_s * (self._run.total - self._run.step) - since_s)

    # Drawing

    def _plain_line(self, metrics: Mapping[str, float]) -> str:
        of_total = f"/{self._run.total}" if self._run.total is not None else ""
        parts = [f"step {self._run.step}{of_total}", *(f"{label} {value}" for label, value in self._shown(metrics))]
        parts.append(f"elapsed {clock_time(self._elapsed_s())}")
        if (left_s := self._left_s()) is not None:
            parts.append(f"left {clock_time(left_s)}")
        return "  ".join(parts)

    def _render(self) -> RenderableType:
        """One frame. It runs on rich's thread: it only reads, and copies what the trainer's thread may change."""
        rows: list[RenderableType] = [self._progress_row(), self._numbers_row()]
        if self._run.phase:
            self._spinner.update(text=styled(self._run.phase.replace("_", " "), "cyan"))
            rows.append(self._spinner)
        stage = f"· {self._stage} " if self._stage else ""
        title = Text.assemble((" nemorl ", "bold green"), (f"{self._run.title} ", "bold"), (stage, "magenta"))
        width = min(self._rich.width, MAX_WIDTH)
        return Panel(Group(*rows), title=title, title_align="left", border_style="bright_black", width=width)

    def _progress_row(self) -> Table:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        step, total = self._run.step, self._run.total
        bar = ProgressBar(total=total, completed=step, pulse=total is None and self._run.closed_at is None)
        count = f"{step}/{total}" if total is not None else f"{step}"
        left_s = self._left_s()
        ending = f"  left {clock_time(left_s)}" if left_s is not None else ""
        row.add_row(bar, Text.assemble("step ", (count, "bold"), f"  {clock_time(self._elapsed_s())}", (ending, "dim")))
        return row

    def _numbers_row(self) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        for label, value in self._shown(dict(self._run.latest)):
            text.append(f"{label} ", style="dim").append(value, style="bold")
            if label == "reward" and self._rich.encoding.startswith("utf"):
                text.append(" ").append(sparkline(list(self._run.rewards)), style="green")
            if label == "accuracy" and self._run.best is not None and f"{self._run.best:.3f}" != value:
                text.append(f" (best {self._run.best:.3f})", style="dim")
            text.append("   ")
        return text or Text("waiting for the first step", style="dim")


def _accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """Accuracy of each validation set by its name, where there are several and not too many: a mean of a set that is to
    rise and of one that is not would say nothing.
    """
    parts = {name.split("/")[1]: value for name, value in metrics.items() if SET_ACCURACY.fullmatch(name)}
    return parts if 1 < len(parts) <= MOST_SETS else {}


def sparkline(values: list[float]) -> str:
    """One block character per value, from the lowest to the highest of them."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    return "".join(SPARK[round((value - low) / span * (len(SPARK) - 1)) if span else 0] for value in values)


INTERVAL_S = 1.0
"""How often the display is asked; it decides itself when silence has been long enough."""


class Heartbeat:
    """Calls ``beat`` every second until it is stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._is_over = beat, threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self._beat()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(INTERVAL_S)
