"""``nemorl runs import-checkpoint``: a checkpoint of NeMo RL in, a Hugging Face folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say

app = plugin_app()


@app.command()
def import_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="A folder step_N of NeMo RL.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="The model folder to write.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="The model that was trained. Unset: as its config says.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the policy of a checkpoint of NeMo RL (DTensor backend) as a Hugging Face folder, to start from.

    Reading it runs no code that is in it. Optimizer state stays behind.

    Example:

      nemorl runs import-checkpoint results/grpo/step_100 models/start
    """
    from nemorl_compat.checkpoints import import_checkpoint as convert

    name = convert(checkpoint, output, model)
    if as_json:
        echo_json({"model": str(output), "trained_from": name})
    else:
        say(f"wrote {output}, trained from {name}: use model: {output}")
