"""``nemorl plugins new KIND NAME``: what people type and read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say

from nemorl_testing.scaffold.names import Names, kind_called, kinds
from nemorl_testing.scaffold.writing import Written, write_package

app = plugin_app()


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(kinds())}.")],
    name: Annotated[str, typer.Argument(help="What configs call it: lower-case words joined by '-' or '_'.")],
    folder: Annotated[Path | None, typer.Option(help="Where to write it. Unset: ./nemorl-NAME.")] = None,
    author: Annotated[str | None, typer.Option(help='For pyproject.toml: "Ada Lovelace <ada@engine.org>".')] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plugin package that works: code, options, tests, README, settings of ruff, mypy and pytest.

    It is small and complete; change it into what you want. An existing folder is never touched. `.github/publish.md` is
    the pull request that lists the plugin in an index, for others to find by `nemorl plugins search`.

    Examples:

      nemorl plugins new environment word-count

      nemorl plugins new algorithm raft --author "Ada Lovelace <ada@engine.org>"

      nemorl plugins new training-backend mine --folder ../mine --json
    """
    names = Names.of(kind_called(kind), name)
    written = write_package(names, folder or Path(names.distribution), author)
    if as_json:
        echo_json(_as_dict(written))
    else:
        _tell(written)


def _as_dict(written: Written) -> dict[str, Any]:
    names = written.names
    return {
        "kind": names.group,
        "name": names.entry,
        "distribution": names.distribution,
        "module": names.module,
        "folder": str(written.folder),
        "files": list(written.files),
        "warnings": list(written.warnings),
        "next": list(written.next_commands),
    }


def _tell(written: Written) -> None:
    names = written.names
    say(f"{written.folder}: the {names.kind.replace('_', ' ')} {names.entry!r}, {len(written.files)} files")
    for warning in written.warnings:
        say(warning, lead=typer.style("warning: ", fg="yellow"), err=True)
    say("next:")
    for command in written.next_commands:
        say(f"  {command}")
