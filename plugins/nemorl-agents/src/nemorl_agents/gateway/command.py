"""``nemorl serve``: a model over the APIs of the gateway, for trying and for other programs; or over Tinker's."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from nemorl_cli.answers import AsJson, echo_json
from nemorl_cli.console import Console
from nemorl_cli.plugin_app import plugin_app
from nemorl_cli.terminal import say

if TYPE_CHECKING:
    from nemorl_agents.gateway.access import Access
    from nemorl_agents.gateway.gateway import GatewayOptions

app = plugin_app()


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder, Hugging Face name, or a run's directory.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Of a run: this checkpoint. Unset: its exported model, or the latest.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. The default lets this machine alone in.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    key: Annotated[
        str | None,
        typer.Option(envvar="NEMORL_SERVE_KEY", help="Key that clients send. Unset: a new one.", show_default=False),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM certificate: clients come by https.", show_default=False)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.", show_default=False)] = None,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="Let other machines in without encryption all the same.")
    ] = False,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A model's name to answer to, besides MODEL; * for any. Repeat it.", show_default=False),
    ] = None,
    ignore_field: Annotated[
        list[str] | None,
        typer.Option(help="A field to leave out where it would be refused. Repeat it.", show_default=False),
    ] = None,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Longest request, images and sounds included.")] = 32,
    backend: Annotated[str, typer.Option(help="Generation backend.")] = "hf",
    temperature: Annotated[float, typer.Option(min=0, help="Where a client names none. 0 is greedy.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    max_sequence_tokens: Annotated[int, typer.Option(min=2, help="Longest prompt and answer together.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the sampling.")] = 0,
    tinker: Annotated[
        bool, typer.Option("--tinker", help="Serve training and sampling to clients of the Tinker API instead.")
    ] = False,
    directory: Annotated[
        Path, typer.Option(help="With --tinker: where checkpoints and the journal are; a server goes on with it.")
    ] = Path("runs/tinker"),
    keys: Annotated[
        Path | None,
        typer.Option(help="With --tinker: a file of lines `NAME KEY`, one per client.", show_default=False),
    ] = None,
    largest_rank: Annotated[
        int, typer.Option(min=1, help="With --tinker: largest rank of adapters; each takes the memory of it.")
    ] = 32,
    snapshots: Annotated[
        int, typer.Option(min=1, max=100, help="With --tinker: weights that are kept ready for sampling.")
    ] = 2,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="With --tinker: keep each client's loop as a run.")
    ] = True,
    precision: Annotated[str, typer.Option(help="With --tinker: of the base's weights, bfloat16 or float32.")] = (
        "float32"
    ),
    as_json: AsJson = False,
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs, or over the Tinker API, until Ctrl-C.

    Examples:

      nemorl serve runs/quickstart-seed0/grpo --port 8000

      nemorl serve runs/grpo-1a2b3c4d --step 100

      nemorl serve runs/grpo-1a2b3c4d --host 0.0.0.0 --tls-certificate node7.pem --tls-key node7.key

      nemorl serve Qwen/Qwen2.5-1.5B-Instruct --name gpt-4o --ignore-field response_format

      nemorl serve Qwen/Qwen2.5-1.5B-Instruct --tinker --port 8000 --directory runs/tinker
    """
    if tinker:
        from nemorl_trust.listening import Place, allow_more_open_files

        from nemorl_agents.serve_tinker import ModelSettings, TinkerSettings, serve_tinker

        allow_more_open_files()
        place = Place(host=host, port=port, tls_certificate=tls_certificate, tls_key=tls_key, plaintext=plaintext)
        settings = ModelSettings(
            model, name[0] if name else model, max_sequence_tokens, largest_rank, precision,
            {"backend": {"name": backend, "snapshots": snapshots}},
        )  # fmt: skip
        serve_tinker(TinkerSettings(settings, directory, place, key, keys, record), as_json=as_json)
        return
    from nemorl_rl.agents.gateways import MIB
    from nemorl_trust.listening import allow_more_open_files

    from nemorl_agents.gateway.gateway import GatewayOptions

    allow_more_open_files()
    names = dict.fromkeys([Path(model).name or model, model, *(name or [])])
    options = GatewayOptions(
        host=host, port=port, models=tuple(names), ignored_fields=tuple(ignore_field or ()),
        tls_certificate=tls_certificate, tls_key=tls_key, plaintext=plaintext, max_body_bytes=max_body_mib * MIB,
    )  # fmt: skip
    sampling = {"backend": backend, "temperature": temperature, "max_new_tokens": max_new_tokens}
    with ExitStack() as stack:
        with Console(quiet=as_json) as console:
            console.announce(f"loading {model}")
            from nemorl_agents.gateway.model_server import model_folder, served

            folder = stack.enter_context(model_folder(model, step))
            access = stack.enter_context(
                served(folder, options, sampling, max_sequence_tokens=max_sequence_tokens, key=key, seed=seed)
            )
        _tell(access, options, as_json=as_json)
        _wait()


def _tell(access: Access, options: GatewayOptions, *, as_json: bool) -> None:
    if as_json:
        facts = {"base_url": access.base_url, "openai_base_url": access.openai_base_url, "api_key": access.api_key}
        echo_json({**facts, "models": [*options.models]})
        return
    say(f"model: {', '.join(options.models)}")
    for name, value in access.variables().items():
        say(f"export {name}={value}")
    say("Ctrl-C ends it", err=True)


def _wait() -> None:
    """Until a signal asks to end."""
    from nemorl.base.process.stopping import GracefulStop

    stop = threading.Event()
    with GracefulStop(lambda _: stop.set()):
        stop.wait()
