"""``nemorl compare steps``: the first step, quantity and token at which two runs part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import console, print_list, styled

if TYPE_CHECKING:
    from nemorl_insight.diff.walking import Walk

DIFFERS = 1
"""Exit code."""
COLUMNS = ("PART", "EXACTLY KNOWN", "BY MEANS", "NOT KNOWN", "VERDICT")

app = plugin_app()


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another one.", show_default=False)],
    tolerance: Annotated[
        float, typer.Option(min=0, help="Numbers this close are equal, relative to the larger or absolute.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Find the first step, quantity and token at which two runs part.

    In the order of computation: config, plugins, libraries; then step by step prompts, sampled tokens, rewards,
    advantages, log-probs, loss, gradient norm, weights. Records, metrics and checkpoints are read, nothing is run. What
    the runs did not keep is said to be not known. Exit 0 if nothing differs, 1 if something does.

    Examples:

      nemorl compare steps runs/grpo-1a2b3c4d runs/grpo-1a2b3c4d-2

      nemorl compare steps runs/one-gpu runs/two-gpus --tolerance 1e-5 --json
    """
    from nemorl_insight.diff.run_files import RunFiles
    from nemorl_insight.diff.telling import as_data
    from nemorl_insight.diff.walking import walk

    found = walk(RunFiles.of(first), RunFiles.of(second), tolerance=tolerance)
    if as_json:
        echo_json(as_data(found, tolerance), indent=2, default=str)
    else:
        show(found)
    if found.differs:
        raise typer.Exit(DIFFERS)


def show(walk: Walk) -> None:
    """The walk in sentences, and what is known of each part."""
    from nemorl_insight.diff.telling import rows, sentences

    for sentence in sentences(walk):
        console().print(styled(sentence))
    console().print()
    print_list(COLUMNS, list(rows(walk)), first_to_go=("BY MEANS", "NOT KNOWN"))
