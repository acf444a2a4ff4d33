"""``nemorl datasets``: the datasets that have a name here, and what is known of one."""

from __future__ import annotations

from typing import Annotated

import typer
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import print_table, say

from nemorl_tasks.datasets.preset_file import TASKS, Preset, find_preset, listed

app = plugin_app()


@app.command()
def datasets(
    name: Annotated[str | None, typer.Argument(help="One of them, or a preset file.", show_default=False)] = None,
    task: Annotated[str | None, typer.Option(help=f"Only those for {', '.join(TASKS)}.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the published datasets that nemorl knows by name: what for, how many rows, under which terms.

    With NAME, say where its rows come from and which columns become what. Nothing is downloaded.

    Examples:

      nemorl datasets

      nemorl datasets --task math --json

      nemorl datasets gpqa_diamond
    """
    if name is not None:
        _describe(name, as_json)
        return
    if task is not None and task not in TASKS:
        fix = did_you_mean(task, TASKS) or f"use one of {', '.join(TASKS)}"
        raise UsageError(f"no dataset is for {task!r}", fix=fix)
    found = listed(task)
    if as_json:
        told = ("name", "other_names", "task", "rows", "hub", "licence", "summary", "homepage", "citation")
        echo_json([{name: getattr(entry, name) for name in told} for entry in found], indent=2)
        return
    rows = [(entry.name, entry.task, _rows(entry), entry.licence, entry.summary) for entry in found]
    print_table(("NAME", "TASK", "ROWS", "LICENCE", "WHAT IT IS"), rows, whole=("NAME", "TASK", "ROWS"))


def _describe(name: str, as_json: bool) -> None:
    preset = find_preset(name)
    fields = preset.model_dump(mode="json", exclude_defaults=True)
    if as_json:
        echo_json(fields, indent=2)
        return
    for key, value in fields.items():
        if isinstance(value, dict):
            value = "; ".join(f"{part}: {what}" for part, what in value.items())  # noqa: PLW2901
        elif isinstance(value, list):
            value = ", ".join(map(str, value))  # noqa: PLW2901
        say(f"{key:<20} {value}")
    say()
    needed = "" if preset.hub else ", path: rows.jsonl"
    say(f"In a config:         data: {{name: {preset.name}{needed}, max_rows: 100}}")


def _rows(entry: Preset) -> str:
    found = ", ".join(f"{count:,} {split}" for split, count in entry.rows.items())
    return found or ("not stated" if entry.hub else "yours")
