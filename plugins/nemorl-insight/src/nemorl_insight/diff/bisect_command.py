"""``nemorl compare bisect``: which difference of two runs, or which checkpoint of one, makes a metric fall."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import console, styled

if TYPE_CHECKING:
    from nemorl_insight.diff.bisecting import Judge
    from nemorl_insight.diff.deltas import Delta
    from nemorl_insight.diff.run_files import RunFiles

NOT_FOUND = 1
"""Exit code: the budget is spent."""
AT_STEP = re.compile(r"(.+)@(\d+)")

app = plugin_app()


@app.command()
def bisect(
    good: Annotated[str, typer.Argument(help="A run directory, or RUN@STEP: a checkpoint.", show_default=False)],
    bad: Annotated[str, typer.Argument(help="The one in which the metric is worse.", show_default=False)],
    metric: Annotated[str, typer.Option(help="Full name, e.g. train/reward.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Length of each probe.")] = 20,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each probe.")] = 1,
    from_step: Annotated[int, typer.Option(min=0, help="Probes begin at GOOD's checkpoint of this step.")] = 0,
    budget: Annotated[int, typer.Option(min=1, help="Most probes that this call makes.")] = 50,
    plugin_folder: Annotated[
        list[Path] | None,
        typer.Option(help="Holds another version of a plugin (pip install --target). Repeat it.", show_default=False),
    ] = None,
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="A rise of the metric is bad.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where probes are kept. Unset: beside GOOD.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find which config key, plugin version or checkpoint makes a metric fall.

    Two runs: the good one's config is run with some of the bad one's settings, by delta debugging, until those are left
    without any of which the metric does not fall. One run, RUN@100 RUN@900: its checkpoints between are evaluated, each
    time the middle one.

    Each probe is a run of its own in the output folder, with a sentence on what it tried and what came of it. The same
    command goes on where it was. Exit 1 when the budget is spent before the answer is known.

    Examples:

      nemorl compare bisect runs/yesterday runs/today --metric train/reward --steps 50 --seeds 3

      nemorl compare bisect runs/yesterday runs/today --metric train/reward --plugin-folder old-grpo

      nemorl compare bisect runs/mine@100 runs/mine@900 --metric validation/accuracy
    """
    from nemorl_insight.diff.bisecting import Judge
    from nemorl_insight.diff.journal import Journal

    sides = [_side(text) for text in (good, bad)]
    question = {"good": good, "bad": bad, "metric": metric, "seeds": seeds, "lower_is_better": lower_is_better}
    question |= {"steps": steps, "from_step": from_step, "plugin_folders": [str(path) for path in plugin_folder or []]}
    for run, step in sides:
        _require_metric(run, metric, is_evaluated=step is not None)
    with _owned(output, sides) as folder:
        journal = Journal(folder, question)
        judge = Judge(journal, metric, budget, (lambda _: None) if as_json else _tell)
        answer = _searched(sides, judge, question, plugin_folder or [])
    if as_json:
        probes = [
            {"name": one.name, "tried": one.tried, "outcome": one.outcome, "text": one.text} for one in journal.probes
        ]
        echo_json({**question, "folder": str(journal.folder), "probes": probes, **answer}, indent=2)
    else:
        for sentence in answer["text"]:
            _tell(sentence)
    if answer["found"] is None:
        raise typer.Exit(NOT_FOUND)


def _searched(
    sides: list[tuple[RunFiles, int | None]], judge: Judge, question: dict[str, Any], folders: list[Path]
) -> dict[str, Any]:
    """The finding as data, with the words for it."""
    from nemorl_insight.diff.bisecting import BudgetSpent, known_so_far

    before = len(judge.journal.probes)
    try:
        if sides[0][1] is None:
            return _of_settings(sides, judge, question, folders)
        return _of_checkpoints(sides, judge, question)
    except BudgetSpent:
        made = len(judge.journal.probes) - before
        text = f"{made} probes were made, and more are needed: the same command goes on. {known_so_far(judge)}"
        return {"found": None, "text": [text]}


def _side(text: str) -> tuple[RunFiles, int | None]:
    from nemorl_insight.diff.run_files import RunFiles

    match = AT_STEP.fullmatch(text)
    if match is None or Path(text).is_dir():
        return RunFiles.of(Path(text)), None
    return RunFiles.of(Path(match[1])), int(match[2])


def _require_metric(run: RunFiles, metric: str, *, is_evaluated: bool) -> None:
    names = {name for line in run.metrics.values() for name in line}
    if metric not in names and not is_evaluated:
        raise UsageError(f"{run.path} logged no {metric}", fix=did_you_mean(metric, names) or "give one that both have")


@contextmanager
def _owned(output: Path | None, sides: list[tuple[RunFiles, int | None]]) -> Iterator[Path]:
    """The folder of the search, where no other process searches meanwhile."""
    from nemorl.base.files.atomic import storing
    from nemorl.base.files.ownership import Ownership

    if output is None:
        names = [f"{run.path.resolve().name}{'' if step is None else f'@{step}'}" for run, step in sides]
        output = sides[0][0].path.parent / f"bisect-{names[0]}-{names[1]}"
    with storing(output):
        output.mkdir(parents=True, exist_ok=True)
    with closing(Ownership(output)):
        yield output


def _of_settings(
    sides: list[tuple[RunFiles, int | None]], judge: Judge, question: dict[str, Any], folders: list[Path]
) -> dict[str, Any]:
    from nemorl_insight.diff.bisecting import guilty_settings
    from nemorl_insight.diff.deltas import config_deltas, plugin_deltas
    from nemorl_insight.diff.probing import ShortRuns

    (good, _), (bad, step) = sides
    if step is not None:
        raise UsageError("one of them is a checkpoint, the other a run", fix="give RUN@STEP twice, or two runs")
    if question["from_step"] and question["from_step"] not in good.checkpoints:
        there = ", ".join(map(str, sorted(good.checkpoints))) or "none"
        raise UsageError(f"{good.path} has no checkpoint of step {question['from_step']}", fix=f"there are: {there}")
    deltas: list[Delta] = [*config_deltas(good, bad), *plugin_deltas(good, bad, folders)]
    told = [*_as_installed(good, bad, deltas), *_as_given(good, bad)]
    for sentence in told:
        judge.tell(sentence)
    if not deltas:
        raise UsageError(
            f"{good.path} and {bad.path} differ in no setting that a probe could change",
            fix=" ".join([*told, "nemorl compare steps says where they part"]),
        )
    runs = ShortRuns(
        good, deltas, judge.metric, question["steps"], question["seeds"], question["from_step"], judge.journal.folder
    )
    found = guilty_settings(runs, judge, lower_is_better=question["lower_is_better"])
    made = len(judge.journal.probes)
    together = " together, and with none of them left out" if len(found) > 1 else ""
    text = f"{judge.metric} {judge.turns} with {'; '.join(delta.text for delta in found)}{together}."
    size = f"{len(deltas)} differences, {made} probes of {question['seeds']} x {question['steps']} steps."
    return {"found": [delta.text for delta in found], "as_installed": told, "text": [text, size]}


def _of_checkpoints(sides: list[tuple[RunFiles, int | None]], judge: Judge, question: dict[str, Any]) -> dict[str, Any]:
    from nemorl_insight.diff.bisecting import guilty_checkpoint
    from nemorl_insight.diff.probing import Evaluations

    (run, first), (other, last) = sides
    if first is None or last is None or run.path.resolve() != other.path.resolve() or first >= last:
        raise UsageError("these are no two checkpoints of one run", fix="give RUN@EARLIER RUN@LATER")
    steps = [step for step in sorted(run.checkpoints) if first <= step <= last]
    missing = sorted({first, last} - set(steps))
    if missing:
        there = ", ".join(map(str, sorted(run.checkpoints))) or "none"
        raise UsageError(f"{run.path} has no checkpoint of step {missing[0]}", fix=f"there are: {there}")
    told = _as_installed(run, run, ())
    for sentence in told:
        judge.tell(sentence)
    runs = Evaluations(run, judge.metric, question["seeds"], judge.journal.folder)
    good, bad = guilty_checkpoint(runs, steps, judge, lower_is_better=question["lower_is_better"])
    text = f"{judge.metric} {judge.turns} between the checkpoints of step {good} and step {bad}."
    size = f"{len(steps)} checkpoints, {len(judge.journal.probes)} probes. What was trained on: "
    samples = f"{size}nemorl view samples {json.dumps(str(run.path))} --step {bad}"
    return {"found": [good, bad], "as_installed": told, "text": [text, samples]}


def _as_installed(good: RunFiles, bad: RunFiles, deltas: Sequence[Delta]) -> list[str]:
    from nemorl_insight.diff.deltas import as_installed

    plugins = as_installed(good, bad, deltas)
    return [f"As installed in every probe (--plugin-folder has others): {'; '.join(plugins)}."] if plugins else []


def _as_given(good: RunFiles, bad: RunFiles) -> list[str]:
    """Surroundings that no config names; probes have them as they are now."""
    from nemorl_insight.diff.settings import settings_between

    given = [setting.text for setting in settings_between(good, bad) if setting.kind == "inputs"]
    return [f"As it is now in every probe: {'; '.join(given)}."] if given else []


def _tell(text: str) -> None:
    console().print(styled(text))
