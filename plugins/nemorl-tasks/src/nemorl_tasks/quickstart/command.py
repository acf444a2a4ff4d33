"""``nemorl quickstart``: from nothing to a model that GRPO has visibly improved, in minutes, offline."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config.load import load_config
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.report.report import write_combined_report
from nemorl_cli.terminal import called, say
from nemorl_rl.data.rows import rows_of
from nemorl_rl.models.tiny import write_tiny_model

from nemorl_tasks.quickstart import recipe

ACCURACY = "validation/accuracy"

app = plugin_app()


@app.command()
def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="Fields of the GRPO stage, as path=value.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seeds everything: weights, data, sampling.")] = 0,
    run_dir: Annotated[Path | None, typer.Option(help="Where to write. Unset: runs/quickstart-seedN.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a tiny model with reinforcement learning, start to finish. No download, no GPU.

    A model with random weights imitates worked additions (SFT), then learns from its own attempts, rewarded when an
    answer is right (GRPO). Run it again to continue where it was interrupted.

    Examples:

      nemorl quickstart

      nemorl quickstart --seed 1 --run-dir /tmp/first-run --json

      nemorl quickstart generation.backend=vllm
    """
    # A model this small is faster on one core: threads would spend their time waiting for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = run_dir or Path("runs") / f"quickstart-seed{seed}"
    with Console() as console:
        summary = run(folder, seed, console, overrides or [])
    if as_json:
        echo_json(summary)
        return
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    say(f"\nheld-out accuracy: {before:.0%} before GRPO, {after:.0%} after ({summary['seconds']:.0f} s)")
    say(f"report: {summary['report']}")
    say(f'try it: {called()} generate --raw --model {folder / "grpo" / "model"} "27+15="')
    if called() != "nemorl":
        say(f"your shell does not find `nemorl` yet: source {shlex.quote(str(Path(called()).with_name('activate')))}")


def run(folder: Path, seed: int, console: Console, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Both stages and the report. A stage that is complete is not repeated."""
    started = time.monotonic()
    console.announce("making a tiny model and its sums")
    base = write_tiny_model(folder / "base", **recipe.MODEL_SIZE)
    # A mistake in an override is said now, not after the first stage, whose model is not there yet.
    load_config(recipe.grpo_config(base, folder / "grpo", seed), overrides)
    teacher = recipe.sloppy_rows(rows_of(recipe.problems(seed), "train") or [])
    stages = [
        ("SFT warm-up", recipe.sft_config(base, folder / "sft", seed), (), teacher),
        ("GRPO", recipe.grpo_config(folder / "sft" / "model", folder / "grpo", seed), overrides, None),
    ]
    for number, (name, config, changes, rows) in enumerate(stages, 1):
        console.stage(f"{name} ({number} of {len(stages)})")
        result = load_config(config, changes).build().fit(rows, resume=True, console=console)
        if result.stopped:
            console.message("saved; run the same command to continue")
            raise typer.Exit
    accuracies = [r[ACCURACY] for r in read_jsonl(folder / "grpo" / "metrics.jsonl") if ACCURACY in r]
    before, after = accuracies[0], accuracies[-1]
    tiles = {"title": "nemorl quickstart", "accuracy before GRPO": f"{before:.0%}", "accuracy after": f"{after:.0%}"}
    runs = [(name, Path(config["run_dir"])) for name, config, _, _ in stages]
    report = write_combined_report(runs, folder / "report.html", tiles)
    return {
        "accuracy_before": before,
        "accuracy_after": after,
        "seconds": round(time.monotonic() - started, 1),
        "run_dir": str(folder),
        "report": str(report),
    }
