"""TinkerServer: the Tinker API over HTTP, on a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Self

from nemorl_trust.audit.recording import record
from nemorl_trust.http_server import HttpServer
from nemorl_trust.listening import HERE, Place

from nemorl_agents.tinker.app import tinker_app
from nemorl_agents.tinker.execution import LossNamed
from nemorl_agents.tinker.flight.observing import Flight
from nemorl_agents.tinker.keys import Keys
from nemorl_agents.tinker.models import Models
from nemorl_agents.tinker.service import Service, Times
from nemorl_agents.tinker.wire.messages import require_messages

WHO = "the Tinker server"
IDLE_S = 120
"""Seconds that a connection without requests is kept: longer than clients keep theirs."""
ENDING_S = 2


class TinkerServer:
    """Serves models to clients of the Tinker API until the block ends.

    Example:
        >>> with TinkerServer(models, Path("runs/tinker"), keys, loss_named) as server:  # doctest: +SKIP
        ...     print(server.address)
    """

    def __init__(
        self,
        models: Models,
        folder: Path,
        keys: Keys,
        loss_named: LossNamed,
        *,
        place: Place = HERE,
        times: Times | None = None,
        keep_snapshots: int = 16,
        flight: Flight | None = None,
    ) -> None:
        """
        Args:
            models: What trains and samples.
            folder: Of the journal and all that is saved; a server that comes back goes on with it.
            keys: Of clients.
            loss_named: Losses by their names; raises ``UsageError`` for one that it does not know.
            place: Where it listens.
            times: How long things are waited for and kept.
            keep_snapshots: Weights without a name that are kept of each model.
            flight: Records the loops. Unset: nobody does.

        Raises:
            UsageError: It cannot listen there, another server has the folder, or the messages are not installed.
        """
        require_messages()
        for key in keys.by_name.values():
            place.require_safe(WHO, key)
        self._place, self._folder = place, folder
        self._socket = place.listen(WHO, waiting=2048)
        try:
            self._service = Service(
                models, folder, keys, loss_named, times=times, keep_snapshots=keep_snapshots, flight=flight
            )
        except BaseException:
            self._socket.close()
            raise
        self._http = HttpServer(WHO, tinker_app(self._service), idle_s=IDLE_S, ending_s=ENDING_S, place=place)
        facts = {"address": self.address, "folder": str(folder), "encrypted": place.tls_certificate is not None}
        record("serving_started", {"models": [base.name for base in models.bases], "clients": [*keys.by_name], **facts})
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="nemorl-tinker-http", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, e.g. ``http://127.0.0.1:41234``: the client's ``base_url``."""
        return self._place.url(self._socket)

    def shutdown(self) -> None:
        """Stop listening, and end after the request that runs. Calling it twice is harmless."""
        if self._thread.is_alive():
            self._http.should_exit = True
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _run(self) -> None:
        await self._service.start()
        try:
            await self._http.serve(sockets=[self._socket])
        finally:
            await self._service.stop()
            self._socket.close()
