"""Commands of plugins, called by name from the command line and from other commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import typer
from nemorl.errors import ForeignError, UsageError, boundary
from nemorl.plugins import PluginEntry, registry

from nemorl_cli.terminal import say

LAUNCH = "launch"
"""Section of a config that says where the run is started, and the command that starts it there."""


def forward(entry: PluginEntry, arguments: Sequence[str]) -> None:
    """Run the command of a plugin, as ``nemorl NAME ARGUMENTS`` does."""
    command = registry().load("commands", entry.id)
    try:
        with boundary(f"command {entry.id}", passing=(typer.Exit, typer.Abort, typer.BadParameter)):
            command(args=list(arguments), prog_name=f"nemorl {entry.name.replace('.', ' ')}")
    except ForeignError as error:
        if not isinstance(error.__cause__, SystemExit):
            raise
        _exit_like(error.__cause__)  # a command may end as it likes, itself


def _exit_like(exit_: SystemExit) -> NoReturn:
    if exit_.code is not None and not isinstance(exit_.code, int):
        say(exit_.code, err=True)
    raise typer.Exit(exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)) from exit_


def is_launched(config: Path, overrides: Sequence[str]) -> bool:
    """Whether a config is for another place, which its section ``launch`` names."""
    from nemorl.base.text.mappings import apply_overrides, read_source

    return apply_overrides(read_source(config), overrides, str(config)).get(LAUNCH) is not None


def launch(
    config: Path,
    overrides: Sequence[str],
    *,
    run_dir: Path | None,
    here_only: Mapping[str, bool | None],
    options: Sequence[str],
) -> None:
    """Submit a run as its section ``launch`` says.

    Args:
        config: The run.
        overrides: ``path=value``.
        run_dir: Where the run keeps its files. Unset: as the config says.
        here_only: Options that a run on this machine alone can have, and whether each was given.
        options: For ``nemorl launch``.

    Raises:
        UsageError: one of these was given.
    """
    given = [name for name, is_given in here_only.items() if is_given]
    if given:
        raise UsageError(
            f"{', '.join(given)} with a section launch: the run is started elsewhere, and continues by itself",
            fix="drop the option, or add launch=null to train on this machine",
        )
    entry = registry().index.find("commands", LAUNCH)
    where = [] if run_dir is None else [f"run_dir={json.dumps(str(run_dir))}"]
    forward(entry, ["submit", str(config), *overrides, *where, *options])
