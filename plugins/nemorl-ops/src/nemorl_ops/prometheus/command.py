"""``nemorl grafana``: the dashboard for Grafana's import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from nemorl.base.files.atomic import replace_text, storing
from nemorl.errors import NemorlError, UsageError
from nemorl.metrics import MetricInfo
from nemorl.plugins import registry
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say

app = plugin_app()


@app.command()
def grafana(
    run_dir: Annotated[
        Path | None, typer.Argument(help="A run, whose metrics it shows. Unset: of all algorithms.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to write. Unset: standard output.")] = None,
) -> None:
    """Write a Grafana dashboard of the metrics that the logger prometheus exposes, as JSON to be imported.

    Panels, units and descriptions come from what algorithms and plugins declare of their metrics.

    Examples:

      nemorl grafana --output dashboard.json

      nemorl grafana runs/grpo-1a2b3c4d > dashboard.json
    """
    from nemorl_ops.prometheus.dashboard import dashboard

    text = json.dumps(dashboard(_installed() if run_dir is None else _of_run(run_dir)), indent=1) + "\n"
    if output is None:
        say(text.rstrip("\n"))
        return
    with storing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, text)
    say(f"wrote {output}: in Grafana, Dashboards > New > Import", err=True)


def _of_run(run_dir: Path) -> dict[str, MetricInfo]:
    from nemorl_cli.report.declared import Declarations, admitted
    from nemorl_cli.report.run_data import RunData

    if not (run_dir / "config.yaml").is_file():
        raise UsageError(f"{run_dir} is not a run directory (no config.yaml)", fix="give the path of a run")
    run = RunData.load(run_dir)
    return dict(Declarations.of(run, admitted(run)).metrics)


def _installed() -> dict[str, MetricInfo]:
    """Metrics that the installed plugins that can be imported declare, each name as it is declared first."""
    found: dict[str, MetricInfo] = {}
    for kind in ("algorithms", "hooks", "environments", "training_backends", "generation_backends"):
        for entry in registry().index.of_kind(kind):
            try:
                declared = registry().load(kind, entry.id).metrics
            except NemorlError:
                continue  # of an optional package that is absent
            found = {**declared, **found}
    return found
