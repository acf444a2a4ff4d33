"""``nemorl config validate | show | schema``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from nemorl.cli.runs import AsJson, ConfigPath, Overrides
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.plugins import registry

app = typer.Typer(no_args_is_help=True, help="Check, show and describe configs.")


@app.command()
def validate(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Report every mistake of a config at once; exit 2 if there is any. Nothing is loaded or started.

    Example:

      nemorl config validate grpo.yaml policy.precision=bfloat16
    """
    try:
        loaded = load_config(config, overrides or [], for_launch=True)
    except ConfigError as error:
        if not as_json:
            raise
        problems = [{"path": p.path, "message": p.message, "fix": p.fix} for p in error.problems]
        typer.echo(json.dumps({"valid": False, "problems": problems}))
        raise typer.Exit(2) from error
    typer.echo(json.dumps({"valid": True, "problems": []}) if as_json else f"{config}: ok ({loaded.algorithm})")


@app.command()
def show(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print a config with every default filled in.

    Example:

      nemorl config show grpo.yaml
    """
    from nemorl.run import to_yaml

    loaded = load_config(config, overrides or [])
    typer.echo(json.dumps(loaded.model_dump(mode="json")) if as_json else to_yaml(loaded), nl=as_json)


@app.command()
def schema(
    algorithm: Annotated[str, typer.Argument(help="Name of an algorithm.")] = "grpo",
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")] = None,
) -> None:
    """Print the JSON Schema of an algorithm's config, installed plugins included.

    In an editor, put this first in a YAML file: # yaml-language-server: $schema=./grpo.schema.json

    Example:

      nemorl config schema grpo --output grpo.schema.json
    """
    text = json.dumps(registry().load("algorithms", algorithm).model_json_schema(), indent=2)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n")
        typer.echo(f"wrote {output}")
