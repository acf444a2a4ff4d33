"""``nemorl certs make | renew | show | ray``: certificates for Ray's nodes, gateways and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import print_table, say, styled

app = plugin_app(help="Certificates for Ray's nodes, gateways and engines.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder of the authority and of the certificates.", show_default=False)]
Days = Annotated[int, typer.Option(min=1, max=825, help="Until they end.")]
SOON = 14


@app.command()
def make(
    folder: Folder,
    hosts: Annotated[
        list[str] | None, typer.Argument(help="Names or addresses; node7,10.0.0.7 is one host.", show_default=False)
    ] = None,
    days: Days = 90,
) -> None:
    """Make certificates for hosts, and an authority that signs them if the folder has none.

    Examples:

      nemorl certs make certs node7 node8,10.0.0.8

      nemorl certs make certs "$(hostname)" --days 30

      nemorl certs make authority
    """
    from nemorl_trust.authority import make

    for path in make(folder, hosts or [], days=days):
        say(f"{path} and {path.with_suffix('.key')}")
    say(f"{folder / 'ca.pem'} is what others need to trust them; keep {folder / 'ca.key'} to yourself")


@app.command()
def renew(
    folder: Folder,
    within: Annotated[
        int | None, typer.Option(help="Only those that end within so many days.", show_default=False)
    ] = None,
    days: Days = 90,
) -> None:
    """Replace the keys and certificates of the hosts in a folder.

    Examples:

      nemorl certs renew certs --within 14
    """
    from nemorl_trust.authority import renew

    found = renew(folder, days=days, within=within)
    for path in found:
        say(f"renewed {path}")
    if not found:
        say("nothing to renew")


@app.command()
def show(
    place: Annotated[Path, typer.Argument(help="A certificate, or a folder of them.", show_default=False)],
    soon: Annotated[int, typer.Option(help="Exit 1 if one ends within so many days.")] = SOON,
    as_json: AsJson = False,
) -> None:
    """Show certificates: for whom they are and when they end.

    Examples:

      nemorl certs show certs

      nemorl certs show certs/node7.pem --soon 30 --json
    """
    from nemorl_trust.authority import read

    found = read(place)
    if as_json:
        rows = [
            {
                "path": str(one.path), "subject": one.subject, "names": [*one.names], "is_authority": one.is_authority,
                "expires": one.expires.isoformat(), "days_left": one.days_left,
            }
            for one in found
        ]  # fmt: skip
        echo_json(rows, indent=2)
    else:
        print_table(
            ("CERTIFICATE", "FOR", "ENDS", "DAYS LEFT"),
            [
                (
                    one.path,
                    "signing others" if one.is_authority else ", ".join(one.names),
                    f"{one.expires:%Y-%m-%d}",
                    styled(one.days_left, "red" if one.days_left <= soon else "green"),
                )
                for one in found
            ],
            whole=("CERTIFICATE",),
        )
    if any(one.days_left <= soon for one in found):
        raise typer.Exit(1)


@app.command()
def ray(
    folder: Annotated[
        Path | None, typer.Argument(help="Of certificates. Unset: this user's.", show_default=False)
    ] = None,
) -> None:
    """Print what a shell must export before `ray start`: this machine's certificate, and that a token is demanded.

    Examples:

      eval "$(nemorl certs ray)" && ray start --head
    """
    import shlex

    from nemorl.resources.ray_errors import MODE
    from nemorl_trust.ray_security import certificates_folder, own_certificate

    place = (folder or certificates_folder()).absolute()
    found = own_certificate(place)
    if not found:
        raise UsageError(
            f"{place} has no certificate of this machine with its key, and ca.pem",
            fix=f"nemorl certs make {place} HOST,ADDRESS",
        )
    for name, value in {**found, MODE: "token"}.items():
        say(f"export {name}={shlex.quote(value)}")
