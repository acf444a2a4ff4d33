"""``nemorl engines list | add | drop``: the engines that a run generates with, while it is on.

They are servers that somebody else started (backend ``server``), or the run's own, on devices of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from nemorl.errors import UsageError
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import print_list, say
from nemorl_rl.placement.fleet_orders import MOST_ADDED, ask, state_of
from nemorl_trust.encryption import PLAINTEXT, origin, plaintext_problem
from nemorl_trust.site import require

from nemorl_agents.servers.config import url_problem
from nemorl_agents.servers.roster import FOLDER, Roster

app = plugin_app(
    help="Engines that a run generates with, servers or its own: list, add, drop while it is on.",
    no_args_is_help=True,
)

Run = Annotated[Path, typer.Argument(help="Directory of the run.", show_default=False)]
Address = Annotated[
    str | None, typer.Argument(help="Address of a server, e.g. https://node7:8000.", show_default=False)
]
SERVER_COLUMNS = ("url", "state", "weights", "in_progress", "served", "lost", "load_s", "trouble")
OWN_COLUMNS = ("name", "state", "lent", "in_progress", "served", "lost", "start_s", "trouble")
ANSWER_S, EACH_S = 60.0, 10.0
"""Longest wait for the run's answer, and what is added for each engine that it is to find devices for."""


@app.command("list")
def show(run: Run, as_json: AsJson = False) -> None:
    """Show the engines of a run: state, requests in progress, requests answered, seconds of the last load or start.

    Examples:

      nemorl engines list runs/grpo-1a2b3c4d

      nemorl engines list runs/grpo-1a2b3c4d --json
    """
    own = state_of(run)
    servers = _servers(run) if own is None or Roster(run / FOLDER).state() is not None else None
    if as_json:
        echo_json({**(servers or {}), **(own or {})}, indent=2)
        return
    if own is not None:
        print_list(OWN_COLUMNS, [tuple(_shown(engine[column]) for column in OWN_COLUMNS) for engine in own["engines"]])
        say("the run has ended" if own["is_over"] else f"{own['backend']}, weights {own['weights']}")
    if servers is not None:
        _show_servers(servers)


def _show_servers(state: dict[str, Any]) -> None:
    print_list(
        SERVER_COLUMNS, [tuple(_shown(server[column]) for column in SERVER_COLUMNS) for server in state["servers"]]
    )
    if state["trouble"]:
        say(state["trouble"])
    known = {server["url"] for server in state["servers"]}
    for url in [url for url in state["wanted"] if url.rstrip("/") not in known]:
        say(f"{url} is wanted; the run has not looked yet")
    if state["weights"] is not None:
        what = f"{state['weights_bytes']:,} bytes, taken from the trainer in {state['write_s']} s"
        say(f"weights {state['weights']}, by {state['way']}: {what}")


@app.command()
def add(
    run: Run,
    url: Address = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_ADDED, help="Start so many more of the run's own engines.", show_default=False),
    ] = None,
    plaintext: Annotated[bool, typer.Option("--plaintext", help="Let http to another machine pass.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let a run use one more server, or start more engines of its own where the cluster has devices for them.

    Each is given the current weights before its first request.

    Examples:

      nemorl engines add runs/grpo-1a2b3c4d https://node9:8000

      nemorl engines add runs/grpo-1a2b3c4d --count 2
    """
    if (url is None) == (count is None):
        raise UsageError("what is added is not said", fix="give the address of a server, or --count N, and not both")
    if url is not None:
        names = [_add_server(run, url, plaintext=plaintext)]
    else:
        assert count is not None, "one of them is given"
        names = _asked(run, {"add": count}, ANSWER_S + EACH_S * count)
    if as_json:
        echo_json({"added": names}, indent=2)
    else:
        started = "have devices and are" if len(names) > 1 else "has a device and is"
        are = "is wanted" if url is not None else f"{started} being started"
        say(f"{', '.join(names)} {are}; `nemorl engines list {run}` says when they are ready")


def _add_server(run: Path, url: str, *, plaintext: bool) -> str:
    problem = url_problem(url) or (None if plaintext else plaintext_problem(url))
    if problem is not None:
        raise UsageError(problem[0], fix=problem[1])
    require("engines", origin(url), url)
    if plaintext_problem(url) is not None:
        require("unlock", PLAINTEXT)
    _change(run, [url.rstrip("/")], [])
    return url


@app.command()
def drop(
    run: Run,
    engine: Annotated[str, typer.Argument(help="Address of a server, or name of an engine.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Let a run leave an engine: what it works on is finished, then it gets no more.

    A server goes on. An engine of the run's own is ended, and its devices are free.

    Examples:

      nemorl engines drop runs/grpo-1a2b3c4d http://node9:8000

      nemorl engines drop runs/grpo-1a2b3c4d engine-1
    """
    if "://" in engine:
        _change(run, [], [engine.rstrip("/")])
    else:
        _asked(run, {"drop": engine}, ANSWER_S)
    if as_json:
        echo_json({"dropped": [engine]}, indent=2)
    else:
        say(f"{engine} gets no more requests")


def _asked(run: Path, order: dict[str, Any], wait_s: float) -> list[str]:
    state = state_of(run)
    if state is None:
        raise UsageError(
            f"{run} has no engines that come and go, or has not begun to generate",
            fix="only engines with devices of their own do, each on one node: set cluster.colocated: false (without "
            "take_turns) and start the run anew",
        )
    if state["is_over"]:
        raise UsageError(f"{run} has ended, and its engines with it", fix="continue it with `nemorl train`")
    return ask(run, order, wait_s)


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _change(run: Path, added: list[str], dropped: list[str]) -> None:
    configured, roster = _state(run)["configured"], Roster(run / FOLDER)
    now = [url.rstrip("/") for url in roster.wanted(configured)]
    for url in dropped:
        if url not in now:
            raise UsageError(f"the run does not use {url}", fix=f"it uses {', '.join(now) or 'none'}")
    roster.want([url for url in [*now, *(url for url in added if url not in now)] if url not in dropped], configured)


def _servers(run: Path) -> dict[str, Any]:
    state = _state(run)
    return {**state, "wanted": Roster(run / FOLDER).wanted(state["configured"])}


def _state(run: Path) -> dict[str, Any]:
    state = Roster(run / FOLDER).state()
    if state is None:
        raise UsageError(
            f"{run} is no run that generates with servers or with engines that come and go, or it has not begun to",
            fix="wait for its first step if it starts; else give the directory of a run with "
            "generation.backend: server, or with cluster.colocated: false (`nemorl runs` lists runs)",
        )
    return state
