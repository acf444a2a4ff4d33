"""HTTP servers of ASGI applications behind a :class:`~nemorl_trust.front_door.FrontDoor`. Needs the extra ``http``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from nemorl_trust.front_door import FrontDoor, Limits
from nemorl_trust.listening import HERE, Place

App = Callable[..., Awaitable[None]]
"""As ASGI has it: takes scope, receive and send"""
HEADER_S = Limits.header_s
"""Beyond the time that uvicorn keeps a connection, for a header that has begun."""


class HttpServer(uvicorn.Server):
    """Serves an application on one listening socket: ``serve(sockets=[listening])``, which closes it in the end."""

    def __init__(
        self,
        who: str,
        app: App,
        *,
        most: int = Limits.most,
        idle_s: int = 5,
        ending_s: int = 2,
        log_level: str = "error",
        place: Place = HERE,
    ) -> None:
        """
        Args:
            who: Listens, for the log.
            app: Answers.
            most: Connections at a time.
            idle_s: Seconds that a connection without requests is kept.
            ending_s: Seconds for answers that are being sent when it is shut down.
            log_level: Of uvicorn's own records. Those below errors are for anybody to cause.
            place: Where the socket listens.
        """
        self._door = FrontDoor(who, Limits(most=most, idle_s=idle_s + HEADER_S))
        super().__init__(
            uvicorn.Config(
                _announced(app, self._door),
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=log_level,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=idle_s,
                timeout_graceful_shutdown=ending_s,
                ssl_certfile=place.tls_certificate,
                ssl_keyfile=place.tls_key,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None, "it takes a listening socket"
        await super().startup(sockets=[])
        (listening,) = sockets
        self._door.open(listening, self._protocol, self.config.ssl)
        self.servers: list[Any] = [self._door]  # closed by uvicorn as its own would be

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=self.config, server_state=self.server_state, app_state={}
        )
        return made


def _announced(app: App, door: FrontDoor) -> App:
    """The application, of whose requests the door is told."""

    async def announced(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        headers = dict(scope["headers"])
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        with door.asked(scope["client"], has_body=has_body) as is_complete:

            async def heard() -> Any:
                event = await receive()
                if event["type"] == "http.request" and not event["more_body"]:
                    is_complete()
                return event

            await app(scope, heard, send)

    return announced
