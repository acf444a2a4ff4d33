"""The command tree, commands that plugins add, and how errors reach a person."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from nemorl import __version__
from nemorl.cli import configs, evals, plugin_installs, plugins, runs
from nemorl.errors import NemorlError
from nemorl.plugins import PluginEntry, registry
from nemorl.plugins.owner import described

USER_ERROR = 2


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Post-train language models with reinforcement learning.",
    epilog="Start with: nemorl quickstart",
)
app.command("train")(runs.train)
app.command("eval")(evals.evaluate)
app.command("generate")(runs.generate)
app.command("export")(runs.export)
app.command("report")(runs.report)
plugins.app.command("install", context_settings=plugin_installs.PASS_ON)(plugin_installs.install)
plugins.app.command("uninstall")(plugin_installs.uninstall)
GROUPS = {"plugins": plugins.app, "config": configs.app, "runs": runs.app}
"""Commands that have commands. Plugins may add to them: the entry ``config.migrate`` is `nemorl config migrate`."""
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nemorl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options that every command has."""


def _add_plugin_commands() -> None:
    """One command per entry of ``nemorl.commands``: described from metadata, imported when it is called."""
    for entry in registry().index.of_kind("commands"):
        if entry.diagnostics:
            continue
        summary = described(entry.point.dist).summary if entry.point.dist is not None else f"from {entry.distribution}"
        group, _, name = entry.name.rpartition(".")
        GROUPS.get(group, app).command(
            name if group in GROUPS else entry.name,
            help=summary,
            rich_help_panel="Commands from plugins",
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_forward_to(entry))


def _forward_to(entry: PluginEntry) -> Callable[[typer.Context], None]:
    def run(ctx: typer.Context) -> None:
        registry().load("commands", entry.id)(args=list(ctx.args), prog_name=f"nemorl {entry.name.replace('.', ' ')}")

    return run


def main() -> None:
    """Entry point. A user's mistake prints what happened and how to fix it, without a traceback, and exits 2."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    _add_plugin_commands()
    try:
        app(arguments, prog_name="nemorl")
    except NemorlError as error:
        if debug:
            traceback.print_exc()
        typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
        typer.echo(str(error), err=True)
        sys.exit(USER_ERROR)
