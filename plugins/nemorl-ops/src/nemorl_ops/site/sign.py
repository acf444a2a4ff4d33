"""``nemorl plugins sign`` and ``verify``: the installed plugins, file by file, under one signature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from nemorl.base.files.atomic import replace_text
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say
from nemorl_trust.signed_json import make_key, public_of, read_private_key, read_public_key

app = plugin_app()


@app.command()
def sign(
    output: Annotated[Path | None, typer.Argument(help="The set to write, e.g. plugins.signed.json.")] = None,
    plugins: Annotated[
        list[str] | None, typer.Argument(help="Distributions. Unset: all that offer plugins.", show_default=False)
    ] = None,
    key: Annotated[Path | None, typer.Option(help="File with the private key.", show_default=False)] = None,
    new_key: Annotated[
        Path | None, typer.Option(help="Make a key: FILE, and FILE.pub beside it.", show_default=False)
    ] = None,
) -> None:
    """Sign the plugins that are installed here, toolkits included, for a policy that admits no others.

    Do it in a fresh environment that you trust. A site's policy names the public key and the set: signed_plugins.

    Examples:

      nemorl plugins sign --new-key site.key

      nemorl plugins sign plugins.signed.json --key site.key
    """
    if new_key is not None:
        make_key(new_key)
        say(f"wrote {new_key} (keep it to yourself) and {public_of(new_key)}")
    if output is None:
        if new_key is None:
            raise UsageError("nothing to do", fix="name the set to write, or --new-key FILE")
        return
    chosen = key or new_key
    if chosen is None:
        raise UsageError("a set is signed with a key", fix="--key FILE; --new-key FILE makes one")
    from nemorl_trust import signatures

    found = signatures.installed_plugins(plugins or ())
    replace_text(output, signatures.sign(found, read_private_key(chosen)))
    say(f"{output}: {len(found)} distributions, {sum(len(plugin.files) for plugin in found)} files")


verify_app = plugin_app()


@verify_app.command()
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
    from nemorl_trust.signatures import differences_from, read_set

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
