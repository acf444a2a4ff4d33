"""The section of a page on the prompts of a run that samples by what became of them (``data.sampling``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl_cli.report.records.prompts import PromptRecords, read_prompts
from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import Curves, Section, Table, Text

MOST_LISTED = 5
"""Prompts in each list."""
SHOWN_CHARACTERS = 80
COLUMNS = ("", "prompt", "pass rate", "at first", "mean reward", "attempts", "groups", "tokens", "last step")
RATE = "train/prompts/pass_rate/"
Prompt = Mapping[str, Any]


def prompt_section(run: RunData, run_dir: Path) -> Section | None:
    """The hardest, the easiest and the most visited prompts, and how pass rates went by difficulty; ``None`` where the
    run keeps no statistics of prompts."""
    records = read_prompts(run_dir)
    if records is None or not len(records.table):
        return None
    curves = {name.removeprefix(RATE): values for name, values in run.metrics.items() if name.startswith(RATE)}
    blocks: list[Text | Table | Curves] = [Text(_summary(records)), Table(COLUMNS, _rows(records.table.to_pylist()))]
    if curves:
        hint = "recent, by the pass rate of a prompt's first group: below a third, between, from two thirds on"
        blocks.append(Curves("Pass rate by difficulty", curves, hint, smooth=True))
    return Section("Prompts", blocks)


def _summary(records: PromptRecords) -> str:
    table = records.table
    rates, groups = table["pass_rate"].to_pylist(), sum(table["visits"].to_pylist())
    return (
        f"{len(table):,} of {records.rows:,} prompts were asked up to step {records.step:,}, in {groups:,} groups. "
        f"Of late {rates.count(1):,} of them always passed, {rates.count(0):,} never."
    )


def _rows(prompts: Sequence[Prompt]) -> list[list[str | float | None]]:
    """The lists one below the other."""
    hardest = sorted(prompts, key=lambda one: (one["pass_rate"], -one["attempts"], one["row"]))
    easiest = sorted(prompts, key=lambda one: (-one["pass_rate"], -one["attempts"], one["row"]))
    visited = sorted(prompts, key=lambda one: (-one["visits"], one["row"]))
    lists = {"hardest": hardest, "easiest": easiest, "most visited": visited}
    return [_row(name, prompt) for name, found in lists.items() for prompt in found[:MOST_LISTED]]


def _row(name: str, prompt: Prompt) -> list[str | float | None]:
    attempts = prompt["attempts"]
    return [
        name,
        prompt["prompt"][:SHOWN_CHARACTERS],
        prompt["pass_rate"],
        prompt["first_pass_rate"],
        prompt["rewards"] / attempts,
        attempts,
        prompt["visits"],
        prompt["tokens"] / attempts,
        prompt["last_step"],
    ]
