"""``nemorl config validate | show | schema | templates``.

Imports that need pydantic are inside the commands: it takes 0.2 s, which ``--help`` need not wait for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nemorl.cli.plugins import as_dict
from nemorl.cli.runs import AsJson, ConfigPath, Overrides
from nemorl.errors import ConfigError, UsageError
from nemorl.plugins import registry
from nemorl.plugins.source import template_text

app = typer.Typer(no_args_is_help=True, help="Check, show and describe configs.")


@app.command()
def validate(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Report every mistake of a config at once; exit 2 if there is any. Nothing is loaded or started.

    Example:

      nemorl config validate grpo.yaml policy.precision=bfloat16
    """
    from nemorl.config.load import load_config

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
    from nemorl.config.load import load_config
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


@app.command()
def templates(
    name: Annotated[str | None, typer.Argument(help="Print this one. Unset: list all.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of stdout.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the config templates that installed plugins offer, or print one to start from.

    Examples:

      nemorl config templates

      nemorl config templates grpo --output my-run.yaml
    """
    index = registry().index
    if name is None:
        known = [as_dict(entry) for entry in index.of_kind("templates")]
        if as_json:
            typer.echo(json.dumps(known, indent=2))
            return
        table = Table(box=None, pad_edge=False)
        for column in ("NAME", "DISTRIBUTION", "SUMMARY"):
            table.add_column(column, overflow="fold")
        for entry in known:
            table.add_row(entry["name"], entry["distribution"], entry["summary"])
        Console().print(table)
        return
    text = template_text(index.find("templates", name))
    if as_json:
        typer.echo(json.dumps({"name": name, "text": text}))
    elif output is None:
        typer.echo(text, nl=False)
    elif output.exists():
        raise UsageError(f"{output} exists", fix="choose another file name")
    else:
        output.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {output}: fill in the model, then `nemorl train {output}`")
