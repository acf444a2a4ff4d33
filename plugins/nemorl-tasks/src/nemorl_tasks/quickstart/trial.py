"""``nemorl config try``: two steps of a config in small, before it goes to the machine it is written for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl.base.text.mappings import apply_overrides, read_source
from nemorl.errors import ConfigError, UsageError
from nemorl.run import TrainResult
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.runs import ConfigPath, Overrides
from nemorl_cli.terminal import say

REWARD = "train/reward"

app = plugin_app()


@app.command("try")
def try_config(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Keep the small config, its models and its run here.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train two steps of a config in small: random models of two layers, one process on the CPU, seconds.

    The config keeps its algorithm, losses, environment and training backend. Models, cluster, generation backend,
    batch sizes and lengths are replaced, and so is data that is not on this disk.

    Examples:

      nemorl config try my-run.yaml

      nemorl config try my-run.yaml environment=math --output /tmp/small
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small is faster on one core
    if output is not None and output.exists():
        raise UsageError(f"{output} exists", fix="choose another folder")
    written = apply_overrides(read_source(config), overrides or [], str(config))
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nemorl-try-")))
        console = stack.enter_context(Console(quiet=as_json))
        result = run(written, folder, console)
    doubt = untried(result.history)
    if as_json:
        answer = {"ok": True, "metrics": dict(result.metrics), "folder": str(folder) if output else None}
        echo_json({**answer, "not_tried": doubt})
        return
    say(f"{config}: trained two steps in small" + (f", kept in {folder}" if output else ""))
    if doubt is not None:
        say(doubt)


def untried(history: Sequence[Mapping[str, float]]) -> str | None:
    """The doubt that two steps leave in which all rewards are the same.

    >>> untried([{"train/reward": 0.0}, {"train/reward": 0.5}])
    """
    rewards = {record[REWARD] for record in history if REWARD in record}
    if len(rewards) != 1:
        return None
    return (
        f"not tried: every reward was {rewards.pop():g}, as a model of random weights answers nothing right: nothing "
        "was learnt, and what a right answer earns is not known: score some of your own"
    )


def run(written: Mapping[str, Any], folder: Path, console: Console) -> TrainResult:
    """Two steps of a config in small.

    Raises:
        ConfigError: the config is wrong, whatever its size.
    """
    from nemorl_tasks.quickstart.shrinking import load_shrunk

    folder.mkdir(parents=True, exist_ok=True)
    console.announce("making small models")
    small = load_shrunk(written, folder)
    assert small.run_dir is not None, "a small config has one"
    if found := list(small.dry_run(small.run_dir, lambda text: console.message(f"warning: {text}"))):
        raise ConfigError(found, source="before loading anything")
    result: TrainResult = small.build().fit(console=console)
    return result
