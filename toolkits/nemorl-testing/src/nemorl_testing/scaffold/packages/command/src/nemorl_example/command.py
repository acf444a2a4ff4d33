"""``nemorl example RUN_DIR``. Imported when it is called, and not before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def summarise(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")],
    metric: Annotated[str, typer.Option(help="Full name of what is summarised.")] = "train/reward",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Say how one metric of a run began, how it ended, and the highest it reached."""
    found = summary(run_dir / "metrics.jsonl", metric)
    typer.echo(json.dumps(found) if as_json else "  ".join(f"{name} {value:g}" for name, value in found.items()))


def summary(file: Path, metric: str) -> dict[str, float]:
    """First, last and highest value.

    Raises:
        UsageError: there is no such file, or it has no such metric.
    """
    if not file.is_file():
        raise UsageError(f"there is no {file}", fix="give the directory of a run")
    records = list(read_jsonl(file))
    values = [record[metric] for record in records if record.get(metric) is not None]  # NaN is written as null
    if not values:
        known = sorted({name for record in records for name in record} - {"step"})
        fix = did_you_mean(metric, known) or f"it has {', '.join(known) or 'none'}"
        raise UsageError(f"{file} has no metric {metric!r}", fix=fix)
    return {"first": values[0], "last": values[-1], "highest": max(values)}
