"""``nemorl plugins verify``: the installed plugins against a signed set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say

app = plugin_app()


@app.command()
def verify(
    signed: Annotated[Path, typer.Argument(help="What `nemorl plugins sign` wrote.", show_default=False)],
    key: Annotated[Path, typer.Option(help="File with the public key.", show_default=False)],
    plugins: Annotated[
        list[str] | None, typer.Argument(help="Distributions. Unset: those of the set.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every file of the installed plugins with a signed set. Exit 1 if one was changed, added or is missing.

    Examples:

      nemorl plugins verify plugins.signed.json --key site.key.pub
    """
    from nemorl_trust.signatures import differences_from, read_public_key, read_set

    found = read_set(signed, [read_public_key(key)])
    names = plugins or [plugin.distribution for plugin in found]
    problems = [*differences_from(found, names)]
    if as_json:
        echo_json({"ok": not problems, "distributions": len(names), "problems": problems}, indent=2)
    else:
        for line in problems:
            say(f" {line}", lead=typer.style("differs:", fg="red"))
        if not problems:
            say(f" {len(names)} distributions are as they were signed", lead=typer.style("ok", fg="green"))
    if problems:
        raise typer.Exit(1)
