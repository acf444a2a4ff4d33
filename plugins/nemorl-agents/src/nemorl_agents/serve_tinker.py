"""``nemorl serve --tinker``: a model for clients of the Tinker API, which train adapters on it and sample from them."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.errors import UsageError
from nemorl_cli.answers import echo_json
from nemorl_cli.console import Console
from nemorl_cli.terminal import say

from nemorl_agents.tinker.models import RUNS, ModelSettings

if TYPE_CHECKING:
    from nemorl_trust.listening import Place

    from nemorl_agents.tinker.keys import Keys
    from nemorl_agents.tinker.trained import TrainedModels

MIB = 1 << 20


__all__ = ["ModelSettings", "TinkerSettings", "serve_tinker"]


@dataclass(frozen=True)
class TinkerSettings:
    """What the command line says."""

    models: ModelSettings
    directory: Path
    place: Place
    key: str | None
    keys: Path | None
    records: bool = True
    """Each client's loop is kept as a run."""

    def clients(self) -> Keys:
        """The keys of clients.

        Raises:
            UsageError: One key and a file of keys are given, or one cannot be used.
        """
        from nemorl_agents.tinker.keys import own_key, read_keys

        if self.keys is None:
            return own_key(self.directory, self.key)
        if self.key is not None:
            raise UsageError("--key and --keys are given", fix="write the key into the file, with a name before it")
        return read_keys(self.keys)


def serve_tinker(settings: TinkerSettings, *, as_json: bool) -> None:
    """Serve until a signal asks to end.

    Raises:
        UsageError: Nothing that is installed trains models for it, or the server cannot begin.
    """
    from nemorl_agents.tinker.wire.messages import require_messages

    require_messages()  # before minutes of loading
    keys = settings.clients()
    with ExitStack() as stack:
        with Console(quiet=as_json) as console:
            console.announce(f"loading {settings.models.model}")
            from nemorl_agents.tinker.losses import loss_named
            from nemorl_agents.tinker.server import TinkerServer
            from nemorl_agents.tinker.trained import recorded, trained_models

            models = stack.enter_context(trained_models(settings.models))
            flight = recorded(models) if settings.records else None
            server = stack.enter_context(
                TinkerServer(models, settings.directory, keys, loss_named, place=settings.place, flight=flight)
            )
        _tell(server.address, settings, keys, models, as_json=as_json)
        _wait()


def _tell(address: str, settings: TinkerSettings, keys: Keys, models: TrainedModels, *, as_json: bool) -> None:
    rank = settings.models.largest_rank
    if as_json:
        facts = {"base_url": address, "api_keys": keys.by_name, "model": settings.models.name}
        adapters = {"largest_rank": rank, "bytes": models.adapter_bytes, "of_head": models.adapts_head}
        echo_json({**facts, "directory": str(settings.directory), "adapters": adapters})
        return
    say(f"model: {settings.models.name}")
    say(f"adapters: up to rank {rank}, {models.adapter_bytes / MIB:.1f} MiB each with gradients and moments")
    if models.ties_head:
        say("train_unembed changes nothing: the output head of this model is its embedding")
    elif not models.adapts_head:
        say("clients pass train_unembed=False: the engine that samples applies no adapters to output heads")
    say(f"directory: {settings.directory} (a server that begins here again goes on with it)")
    if settings.records:
        say(f"loops of clients are kept as runs: nemorl view {settings.directory / RUNS}")
    say(f"export TINKER_BASE_URL={address}")
    for name, key in keys.by_name.items():
        note = f"  # {name}" if len(keys.by_name) > 1 else ""
        say(f"export TINKER_API_KEY={key}{note}")
    say("Ctrl-C ends it", err=True)


def _wait() -> None:
    from nemorl.base.process.stopping import GracefulStop

    stop = threading.Event()
    with GracefulStop(lambda _: stop.set()):
        stop.wait()
