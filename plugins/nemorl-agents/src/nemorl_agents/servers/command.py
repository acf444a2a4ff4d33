"""``nemorl engines list | add | drop``: the servers that a run generates with, while it is on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import print_list, say
from nemorl_trust.encryption import PLAINTEXT, origin, plaintext_problem
from nemorl_trust.site import require

from nemorl_agents.servers.config import url_problem
from nemorl_agents.servers.roster import FOLDER, Roster

app = plugin_app(
    help="Servers that a run generates with: list, add, drop while it is on.",
    no_args_is_help=True,
)

Run = Annotated[Path, typer.Argument(help="Directory of the run.", show_default=False)]
Address = Annotated[str, typer.Argument(help="Address of the server, e.g. https://node7:8000.", show_default=False)]


@app.command("list")
def show(run: Run, as_json: AsJson = False) -> None:
    """Show the servers of a run: state, weights, requests in progress, responses, seconds of the last load.

    Examples:

      nemorl engines list runs/grpo-1a2b3c4d
    """
    state = _state(run)
    wanted = Roster(run / FOLDER).wanted(state["configured"])
    if as_json:
        echo_json({**state, "wanted": wanted}, indent=2)
        return
    columns = ("url", "state", "weights", "in_progress", "served", "lost", "load_s", "trouble")
    rows = [tuple(_shown(server[column]) for column in columns) for server in state["servers"]]
    print_list(columns, rows)
    if state["trouble"]:
        say(state["trouble"])
    known = {server["url"] for server in state["servers"]}
    for url in [url for url in wanted if url.rstrip("/") not in known]:
        say(f"{url} is wanted; the run has not looked yet")
    if state["weights"] is not None:
        what = f"{state['weights_bytes']:,} bytes, taken from the trainer in {state['write_s']} s"
        say(f"weights {state['weights']}, by {state['way']}: {what}")


@app.command()
def add(
    run: Run,
    url: Address,
    plaintext: Annotated[bool, typer.Option("--plaintext", help="Let http to another machine pass.")] = False,
) -> None:
    """Let a run use one more server. It is checked and given the current weights before its first request.

    Examples:

      nemorl engines add runs/grpo-1a2b3c4d https://node9:8000
    """
    problem = url_problem(url) or (None if plaintext else plaintext_problem(url))
    if problem is not None:
        raise UsageError(problem[0], fix=problem[1])
    require("engines", origin(url), url)
    if plaintext_problem(url) is not None:
        require("unlock", PLAINTEXT)
    _change(run, [url.rstrip("/")], [])
    say(f"{url} is wanted; `nemorl engines list {run}` says when it is ready")


@app.command()
def drop(run: Run, url: Address) -> None:
    """Let a run leave a server: what it works on is finished, then it gets no more. The server itself goes on.

    Examples:

      nemorl engines drop runs/grpo-1a2b3c4d http://node9:8000
    """
    _change(run, [], [url.rstrip("/")])
    say(f"{url} gets no more requests")


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _change(run: Path, added: list[str], dropped: list[str]) -> None:
    configured, roster = _state(run)["configured"], Roster(run / FOLDER)
    now = [url.rstrip("/") for url in roster.wanted(configured)]
    for url in dropped:
        if url not in now:
            raise UsageError(f"the run does not use {url}", fix=f"it uses {', '.join(now) or 'none'}")
    roster.want([url for url in [*now, *(url for url in added if url not in now)] if url not in dropped], configured)


def _state(run: Path) -> dict[str, Any]:
    state = Roster(run / FOLDER).state()
    if state is None:
        raise UsageError(
            f"{run} is no run that generates with servers, or it has not begun to",
            fix="give the directory of a run with generation.backend: server (`nemorl runs` lists runs)",
        )
    return state
