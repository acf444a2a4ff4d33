"""``nemorl plugins sign`` and ``verify``: the installed plugins, file by file, under one signature."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from nemorl.base.files.atomic import replace_text
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


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
        say(f"wrote {new_key} (keep it to yourself) and {_public(new_key)}")
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


def make_key(path: Path) -> None:
    """Write a new private key, for nobody else to read, and its public key beside it.

    Raises:
        UsageError: There is a file already.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists", fix="choose another file: a key is never overwritten") from None
    with os.fdopen(file, "wb") as target:
        target.write(text)
    replace_text(_public(path), public.decode())


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """
    Raises:
        UsageError: There is no Ed25519 key in the file, or it has a passphrase.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} holds no private key: {error}", fix="--new-key FILE makes one") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} holds a key that is not Ed25519", fix="--new-key FILE makes one")
    return key


def _public(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


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
