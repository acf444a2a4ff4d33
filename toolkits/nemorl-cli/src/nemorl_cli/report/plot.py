"""``nemorl.plot_run``: the metrics of a run as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError
from nemorl.run import HEADLINES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_run(
    run_dir: Path | str,
    path: Path | str | None = None,
    metrics: Sequence[str] = (),
    *,
    history: Sequence[Mapping[str, float]] = (),
) -> Figure:
    """Curves over the steps of a whole run, one panel per metric.

    Args:
        run_dir: Of the run.
        path: Also write them to this file; its suffix says how (``.png``, ``.svg``, ``.pdf``).
        metrics: Names as in ``metrics.jsonl``. Empty: accuracy, validation loss, reward and loss, where logged.
        history: Records to plot where the directory has none.

    Returns:
        A matplotlib figure, which notebooks display.

    Raises:
        UsageError: matplotlib is not installed, or the run never logged a metric.

    Example:
        >>> plot_run("runs/first", "curves.png", ["train/reward"])  # doctest: +SKIP
    """
    if find_spec("matplotlib") is None:
        raise UsageError("plot needs matplotlib", fix='pip install "nemorl-cli[plot]"; report.html needs nothing')
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    records: Sequence[Mapping[str, float]] = list(read_jsonl(run_dir / "metrics.jsonl")) or history
    logged = dict.fromkeys(name for record in records for name in record if name not in ("step", "time"))
    names = list(metrics) or [name for name in HEADLINES if name in logged]
    for name in names:
        if name not in logged:
            guess = did_you_mean(name, logged)
            raise UsageError(f"{run_dir} never logged {name!r}", fix=guess or "choose a name of metrics.jsonl")
    if not names:
        raise UsageError(f"{run_dir} logged nothing to plot", fix="name metrics, or train for a step")
    figure = Figure(figsize=(7, 2.2 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        panel.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None)
        panel.set_ylabel(name)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.suptitle(run_dir.name)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure
