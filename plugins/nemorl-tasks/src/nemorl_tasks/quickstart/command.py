"""``nemorl quickstart``: from nothing to a model that GRPO has visibly improved, in minutes, offline."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config.load import load_config
from nemorl.types import Row
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.report.report import write_combined_report
from nemorl_cli.terminal import called, print_table, say

from nemorl_tasks.quickstart import recipe, vision

app = plugin_app()


class Recipe(Protocol):
    """A model, what it imitates, and two configs: the modules ``recipe`` and ``vision``."""

    @property
    def NAME(self) -> str:
        """Of the folder: ``runs/NAME-seedN``."""

    @property
    def ACCURACY(self) -> str:
        """Metric of the second run that is to rise."""

    @property
    def CONTROL(self) -> str | None:
        """Metric of the second run that has to stay at chance, if there is one."""

    def write_model(self, path: Path) -> Path: ...
    def taught_rows(self, seed: int) -> list[Row]: ...
    def sft_config(self, base: Path, run_dir: Path, seed: int) -> dict[str, Any]: ...
    def grpo_config(self, model: Path, run_dir: Path, seed: int) -> dict[str, Any]: ...


@app.command()
def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="Fields of the GRPO stage, as path=value.")] = None,
    with_vision: Annotated[bool, typer.Option("--vision", help="Count shapes in drawings instead of adding.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seeds everything: weights, data, sampling.")] = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to write. Unset: runs/quickstart-seedN, or runs/quickstart-vision-seedN.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a tiny model with reinforcement learning, start to finish. No download, no GPU.

    A model with random weights imitates worked additions (SFT), then learns from its own attempts, rewarded when an
    answer is right (GRPO). With --vision it counts the shapes of drawings, and is asked about blank images too, to see
    that it looks. Run it again to continue where it was interrupted.

    Examples:

      nemorl quickstart

      nemorl quickstart --vision

      nemorl quickstart --seed 1 --run-dir /tmp/first-run --json

      nemorl quickstart generation.backend=vllm
    """
    # A model this small is faster on one core: threads would spend their time waiting for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen: Recipe = vision if with_vision else recipe
    folder = run_dir or Path("runs") / f"{chosen.NAME}-seed{seed}"
    with Console() as console:
        summary = run(folder, seed, console, overrides or [], chosen)
    if as_json:
        echo_json(summary)
        return
    tell = _tell_sight if with_vision else _tell
    tell(summary, folder)
    if called() != "nemorl":
        say(f"your shell does not find `nemorl` yet: source {shlex.quote(str(Path(called()).with_name('activate')))}")


def _tell(summary: Mapping[str, Any], folder: Path) -> None:
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    say(f"\nheld-out accuracy: {before:.0%} before GRPO, {after:.0%} after ({summary['seconds']:.0f} s)")
    say(f"report: {summary['report']}")
    say(f'try it: {called()} generate --raw --model {folder / "grpo" / "model"} "27+15="')


def _tell_sight(summary: Mapping[str, Any], folder: Path) -> None:
    columns = ("right answers", "drawings", "blank images")
    figures = (
        ("before GRPO", summary["accuracy_before"], summary["control_before"]),
        ("after GRPO", summary["accuracy_after"], summary["control_after"]),
        ("without looking", vision.CHANCE, vision.CHANCE),
    )
    say()
    print_table(columns, [(name, f"{seen:.0%}", f"{blank:.0%}") for name, seen, blank in figures], numbers=columns[1:])
    say(f"\nblank images: the same questions, with no shape to count. It took {summary['seconds']:.0f} s.")
    say(f"report: {summary['report']}")
    say(f"look at drawings and answers: {called()} view {folder / 'grpo'}")
    blind = f"--seed {summary['seed']} --run-dir {folder.with_name(folder.name + '-blank')} data.blank=true"
    say(f"GRPO on blank images, which teach nothing: {called()} quickstart --vision {blind}")


def run(
    folder: Path, seed: int, console: Console, overrides: Sequence[str] = (), chosen: Recipe = recipe
) -> dict[str, Any]:
    """Both stages and the report. A stage that is complete is not repeated.

    Returns:
        ``accuracy_before`` and ``accuracy_after`` GRPO, of 0 to 1; ``control_before`` and ``control_after`` if the
        recipe has a control; ``seed``, ``seconds``, ``run_dir`` and ``report``.
    """
    started = time.monotonic()
    console.announce("making a tiny model and its tasks")
    base = chosen.write_model(folder / "base")
    # A mistake in an override is said now, not after the first stage, whose model is not there yet.
    load_config(chosen.grpo_config(base, folder / "grpo", seed), overrides)
    stages = [
        ("SFT warm-up", chosen.sft_config(base, folder / "sft", seed), (), chosen.taught_rows(seed)),
        ("GRPO", chosen.grpo_config(folder / "sft" / "model", folder / "grpo", seed), overrides, None),
    ]
    for number, (name, config, changes, rows) in enumerate(stages, 1):
        console.stage(f"{name} ({number} of {len(stages)})")
        result = load_config(config, changes).build().fit(rows, resume=True, console=console)
        if result.stopped:
            console.message("saved; run the same command to continue")
            raise typer.Exit
    figures = _first_and_last(folder / "grpo" / "metrics.jsonl", "accuracy", chosen.ACCURACY)
    tiles = {"title": "nemorl quickstart", "accuracy before GRPO": f"{figures['accuracy_before']:.0%}"}
    tiles["accuracy after"] = f"{figures['accuracy_after']:.0%}"
    if chosen.CONTROL is not None:
        figures |= _first_and_last(folder / "grpo" / "metrics.jsonl", "control", chosen.CONTROL)
        tiles["on blank images"] = f"{figures['control_after']:.0%}"
    runs = [(name, Path(config["run_dir"])) for name, config, _, _ in stages]
    report = write_combined_report(runs, folder / "report.html", tiles)
    return {
        **figures,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "run_dir": str(folder),
        "report": str(report),
    }


def _first_and_last(metrics: Path, name: str, metric: str) -> dict[str, float]:
    values = [record[metric] for record in read_jsonl(metrics) if metric in record]
    return {f"{name}_before": values[0], f"{name}_after": values[-1]}
