"""``nemorl view``: runs on a local page."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say

app = plugin_app()


@app.command()
def view(
    runs: Annotated[list[Path], typer.Argument(help="Runs, or outputs of eval.", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Beyond this machine it takes --tls-certificate or --plaintext.")
    ] = "127.0.0.1",
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM certificate: browsers come by https.", show_default=False)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.", show_default=False)] = None,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="Let other machines in without encryption all the same.")
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open the page.")] = True,
    as_json: AsJson = False,
) -> None:
    """Look into runs on a local page, live while they go on, until Ctrl-C.

    Curves of several runs over each other; steps, groups and responses with filters, orders and a search; each token
    with its log-probs and weight; a timeline of each step; settings and events. No file of a run is changed.
    `nemorl report` writes the same page as one file.

    Examples:

      nemorl view runs/grpo-1a2b3c4d

      nemorl view runs/new runs/base --no-browser --port 8000

      nemorl view runs/grpo-1a2b3c4d --json
    """
    from nemorl.base.process.stopping import GracefulStop
    from nemorl_trust.listening import Place

    from nemorl_insight.view.serving import Viewer
    from nemorl_insight.view.watched import cache_folder

    place = Place(host, port, tls_certificate, tls_key, plaintext)
    stop = threading.Event()
    with GracefulStop(lambda _: stop.set()), Viewer(runs, cache_folder(), place) as viewer:
        if as_json:
            echo_json({"url": viewer.url})
        else:
            say(viewer.url)
            say("Ctrl-C ends it", err=True)
        if browser and not as_json:
            import webbrowser

            webbrowser.open(viewer.url_for_one_browser())
        stop.wait()
