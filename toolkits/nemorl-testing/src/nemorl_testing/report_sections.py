"""Checks of report sections: plain data from whatever a run left behind, which the report can draw."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import Curves, Section, Table, Text
from nemorl_cli.report.viewing.overview import blocks_of

from nemorl_testing.kit import NotApplicable, Subject, expect

STEPS = 4


def check_it_gives_a_section_or_nothing(subject: Subject) -> None:
    """A run's records give a ``Section`` of texts, tables and curves, or ``None``. (DESIGN 8)"""
    made = _made(subject, _run(subject))
    if made is None:
        return
    expect(isinstance(made, Section), f"it returned {made!r:.200}")
    strange = [block for block in made.blocks if not isinstance(block, (Text, Table, Curves))]
    expect(not strange, f"a block is {strange[:1]!r:.200}, neither Text nor Table nor Curves")


def check_run_without_records_is_no_error(subject: Subject) -> None:
    """A run that died before its first step has a report too. (DESIGN 8)"""
    _made(subject, RunData("empty"))


def check_records_are_left_as_they_are(subject: Subject) -> None:
    """What other sections read is not changed. (DESIGN 8)"""
    run = _run(subject)
    before = copy.deepcopy(run)
    _made(subject, run)
    expect(run == before, "the records of the run were changed")


def check_report_can_draw_it(subject: Subject) -> None:
    """Rows fit their columns, and curves are numbers by step. (DESIGN 8)"""
    made = _made(subject, _run(subject))
    if not isinstance(made, Section):
        raise NotApplicable("it has nothing to show of this run: give run_dir=, a folder of a run that it is about")
    for table in (block for block in made.blocks if isinstance(block, Table)):
        widths = {len(row) for row in table.rows}
        expect(widths <= {len(table.columns)}, f"{len(table.columns)} columns, rows of {sorted(widths)} cells")
    blocks_of(made.blocks)


def _made(subject: Subject, run: RunData) -> Any:
    subject.require_modules()
    return subject.config.build()(run)


def _run(subject: Subject) -> RunData:
    """The author's run, or one of four steps that sampled, validated and saved."""
    if subject.settings.run_dir is not None:
        return RunData.load(Path(subject.settings.run_dir))
    metrics = ("train/reward", "train/loss", "train/grad_norm", "timing/train/total_step_time")
    return RunData(
        "checked",
        config={"algorithm": "grpo", "model": "tiny", "max_steps": STEPS},
        environment={"python": "3.11", "libraries": {"torch": "2.13"}},
        metrics={
            **{name: {step: step / 8 for step in range(1, STEPS + 1)} for name in metrics},
            "validation/accuracy": {0: 0.25, STEPS: 0.75},
        },
        samples=tuple(
            {"step": step, "split": "train", "prompt": "1+1=", "response": str(step), "answer": "2",
             "reward": float(step == 2), "finish_reason": "stop", "tokens": 1}
            for step in range(1, STEPS + 1)
        ),
        events=({"time": 1000.0, "event": "started"}, {"time": 1016.0, "event": "finished"}),
        times=(1000.0, 1016.0),
    )  # fmt: skip
