"""``nemorl serve``: a model folder over the APIs of the gateway, for trying and for other programs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from nemorl_commands.answers import AsJson, echo_json
from nemorl_commands.console import Console
from nemorl_commands.terminal import say

if TYPE_CHECKING:
    from nemorl_gateway.access import Access
    from nemorl_gateway.options import GatewayOptions

CALL_S = 3600.0
"""Longest time to one answer."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder or Hugging Face name.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on. The default lets this machine alone in.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    key: Annotated[
        str | None,
        typer.Option(envvar="NEMORL_SERVE_KEY", help="Key that clients send. Unset: a new one.", show_default=False),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A model's name to answer to, besides MODEL; * for any. Repeat it.", show_default=False),
    ] = None,
    ignore_field: Annotated[
        list[str] | None,
        typer.Option(help="A field to leave out where it would be refused. Repeat it.", show_default=False),
    ] = None,
    backend: Annotated[str, typer.Option(help="Generation backend.")] = "hf",
    temperature: Annotated[float, typer.Option(min=0, help="Where a client names none. 0 is greedy.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    max_sequence_tokens: Annotated[int, typer.Option(min=2, help="Longest prompt and answer together.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs until Ctrl-C.

    Examples:

      nemorl serve runs/quickstart/model --port 8000

      nemorl serve Qwen/Qwen2.5-1.5B-Instruct --name gpt-4o --ignore-field response_format
    """
    from nemorl_gateway.options import GatewayOptions

    names = dict.fromkeys([Path(model).name or model, model, *(name or [])])
    options = GatewayOptions(host=host, port=port, models=tuple(names), ignored_fields=tuple(ignore_field or ()))
    sampling = {"backend": backend, "temperature": temperature, "max_new_tokens": max_new_tokens}
    with ExitStack() as stack:
        with Console(quiet=as_json) as console:
            console.announce(f"loading {model}")
            served_model = served(model, options, sampling, max_sequence_tokens=max_sequence_tokens, key=key, seed=seed)
            access = stack.enter_context(served_model)
        _tell(access, options, as_json=as_json)
        _wait()


@contextmanager
def served(
    model: str,
    options: GatewayOptions,
    generation: dict[str, object],
    *,
    max_sequence_tokens: int,
    key: str | None = None,
    seed: int = 0,
) -> Iterator[Access]:
    """A model on disk, loaded and served.

    Args:
        model: Folder or hub name.
        options: Of the gateway.
        generation: Fields of ``GenerationConfig``.
        max_sequence_tokens: Longest prompt and answer; the model's own limit if that is smaller.
        key: That clients send. Unset: a new one.
        seed: Seeds all calls.
    """
    from nemorl.config.models import GenerationConfig, PolicyConfig
    from nemorl_rl.agents.contract import EpisodeLimits
    from nemorl_rl.agents.policy import Sampler
    from nemorl_rl.chat.codec import codec_of
    from nemorl_rl.hub_models import require_model
    from nemorl_rl.resources import standalone_generation
    from nemorl_rl.tokenizer import Tokenizer, context_tokens

    from nemorl_gateway.gateway import Gateway
    from nemorl_gateway.serving import MOST_CALLS, ServedPolicy
    from nemorl_gateway.text import TokenizerText

    config = GenerationConfig.model_validate(generation)
    require_model(model)
    limit = min(max_sequence_tokens, context_tokens(model) or max_sequence_tokens)
    policy_config = PolicyConfig(model_name=model, max_sequence_tokens=limit)
    tokenizer = Tokenizer.of(policy_config)
    codec = codec_of(tokenizer)
    with Gateway(options, text=TokenizerText(tokenizer, codec)) as gateway:
        engine = standalone_generation(config, policy_config)
        try:
            sampler = Sampler(engine, config.sampling(), honours_clients=True)
            limits = EpisodeLimits(limit, config.max_new_tokens, MOST_CALLS, CALL_S)
            yield gateway.open_at_root(ServedPolicy(sampler, codec, limits, seed=seed), key=key)
            gateway.shutdown()
        finally:
            engine.shutdown()


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
    from nemorl_base.stopping import GracefulStop

    stop = threading.Event()
    with GracefulStop(lambda _: stop.set()):
        stop.wait()
