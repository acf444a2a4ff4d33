"""``nemorl view watch``: look on while a run trains, from another terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import RECENT_STEPS, Console
from nemorl_cli.terminal import say

ENDINGS = {
    "finished": "the run is finished",
    "stopped": "the run was stopped; --resume continues it",
    "failed": "the run failed",
    "lost": "the run's process is gone without a word: killed, or the machine was; --resume continues it",
}
POLL_S = 0.5


def watch(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory.", show_default=False)],
    samples: Annotated[int, typer.Option(min=0, help="Responses shown of each recorded step; 0: none.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Follow a run under way: its numbers, and the newest responses. Ends when the run does.

    Works from any machine that sees the run's directory, and changes nothing there. With --json each line is an object
    with one key: metrics, event or sample. Exit 1 if the run failed or its process is gone.

    Examples:

      nemorl view watch runs/grpo-1a2b3c4d

      nemorl view watch runs/grpo-1a2b3c4d --samples 3

      nemorl view watch runs/grpo-1a2b3c4d --json | jq .metrics
    """
    from nemorl_cli.report.run_data import no_run

    if not (run_dir / "config.yaml").is_file():
        raise no_run(run_dir)
    status = _print_lines(run_dir, samples) if as_json else _display(run_dir, samples)
    if status in ("failed", "lost"):
        raise typer.Exit(1)


def _print_lines(run_dir: Path, count: int) -> str:
    from nemorl_cli.following import Following

    run = Following(run_dir)
    while True:
        events = run.events()
        status = run.status  # before what it wrote is read: what comes later is not lost
        for kind, found in (("event", events), ("metrics", run.metrics.read()), ("sample", run.samples(count))):
            for item in found:
                echo_json({kind: item}, default=str)
        if status != "incomplete":
            return status
        time.sleep(POLL_S)


def _display(run_dir: Path, count: int) -> str:
    from nemorl_cli.following import Following
    from nemorl_cli.report.run_data import RunData

    run, clock = Following(run_dir), _Clock()
    past = list(run.metrics.read())
    clock.show(past[0] if past else {})
    with Console(clock=clock) as console:
        console.start(run_dir.resolve().name, RunData.load(run_dir).max_steps)
        for record in _recent(past):
            clock.show(record)
            _step(console, record)
        clock.show({})
        console.phase("waiting for the next step")
        while True:
            events = run.events()
            status = run.status
            for record in run.metrics.read():
                _step(console, record)
            for event in events:
                _warn(console, event)
            for sample in run.samples(count):
                _tell(console, run_dir, sample)
            if status != "incomplete":
                break
            time.sleep(POLL_S)
    reason = next((str(event["error"]) for event in reversed(events) if event.get("error")), "")
    say(f"{ENDINGS[status]}{f': {reason}' if reason else ''}", err=True)
    return status


class _Clock:
    """Seconds of the run: those of a record that is being shown again, else now."""

    def __init__(self) -> None:
        self._recorded: float | None = None

    def show(self, record: dict[str, Any]) -> None:
        recorded = record.get("time")
        self._recorded = float(recorded) if isinstance(recorded, int | float) else None

    def __call__(self) -> float:
        return time.time() if self._recorded is None else self._recorded


def _recent(past: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest records, and before them one that holds the latest of all metrics."""
    before: dict[str, Any] = {}
    for record in past[:-RECENT_STEPS]:
        before |= record
    return [*([before] if before else []), *past[-RECENT_STEPS:]]


def _step(console: Console, record: dict[str, Any]) -> None:
    step = record.get("step")
    if isinstance(step, int):
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        console.step(step, {name: value for name, value in numbers.items() if name not in ("step", "time")})


def _warn(console: Console, event: dict[str, Any]) -> None:
    """An alert that was raised or is over; other events stay in the file."""
    from nemorl_rl.alerts.alert import EVENT, OVER

    if event.get("event") == EVENT:
        console.message(f"alert {event.get('rule')}: {event.get('text')}")
    elif event.get("event") == OVER:
        console.message(f"alert {event.get('rule')} is over at step {event.get('step')}")


def _tell(console: Console, run_dir: Path, sample: dict[str, Any]) -> None:
    from nemorl_rl.rollouts.completions import completion_text

    from nemorl_cli.report.records.media_labels import labels_of
    from nemorl_cli.report.records.picking import prompt_items

    text = completion_text(
        sample["step"],
        " ".join([*labels_of(run_dir, prompt_items(sample)), str(sample["prompt"] or "")]),
        str(sample["response"] or ""),
        reward=sample["reward"] or 0.0,
        tokens=sample["tokens"] or 0,
        truncated=sample["finish_reason"] == "length",
    )
    console.message(text if sample["split"] == "train" else f"{sample['split']}, {text}")
