"""Relay: one address for the model calls of many episodes, each of which has an address and a key of its own.

verifiers and NeMo-Gym know one model server for all their episodes. What they do send along is an episode's name: in
the path (``/ng-rollout/NAME/v1/…``), in a header (``X-Session-ID``) or in the body's ``metadata``. The relay finds the
episode by it and passes the call on. Runs in nemorl's process and in those of other projects: it imports aiohttp and
the standard library only, and is given the class of its door.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

if TYPE_CHECKING:
    from nemorl_trust.front_door import FrontDoor

SESSION_HEADER = "X-Session-ID"
SEAT_HEADER = "X-Nemorl-Seat"
METADATA_KEY = "nemorl_episode"
MAX_BODY_BYTES = 64 << 20
BODY_S = 30.0
"""Longest time for a body to arrive."""
WAITING = 1024
"""Connections that may wait until they are taken."""
_PATH = re.compile(r"(?:/ng-rollout/(?P<name>[^/]+))?(?:/training-token-capture)?(?P<rest>/v1/.+)")
_OWN_HEADERS = frozenset(
    (
        *("authorization", "x-api-key", "host", "connection", "keep-alive", "transfer-encoding", "te", "trailer"),
        *("upgrade", "expect", "content-length", "accept-encoding", "content-encoding", "cookie", "set-cookie"),
        *("date", "server"),
    )
)
"""Of this connection, in both directions; all others are passed on."""


@dataclass(frozen=True)
class Route:
    """Where an episode's calls go."""

    base_url: str
    """Without ``/v1``."""
    api_key: str = field(repr=False)
    seat: str = ""
    """Who calls, where the episode has several."""


class Relay:
    """A server on this machine. ``routes`` may be changed at any time, by any thread."""

    def __init__(self, model: str, door: FrontDoor, *, host: str = "127.0.0.1") -> None:
        """
        Args:
            model: The name that it answers to.
            door: Lets its connections in.
            host: Where it listens.
        """
        self.routes: dict[str, Route] = {}
        self.port = 0
        self._model, self._door, self._host = model, door, host
        self._runner: web.AppRunner | None = None
        self._client: ClientSession | None = None
        self._listening: socket.socket | None = None

    @property
    def base_url(self) -> str:
        """The base URL for clients of OpenAI."""
        return f"http://{self._host}:{self.port}/v1"

    async def start(self, port: int = 0) -> None:
        """Listen; ``0``: on a free port.

        Raises:
            OSError: The port is taken.
        """
        # Gym and verifiers bound their own calls, and generation takes what it takes.
        self._client = ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0))
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._announced])
        app.router.add_get("/", self._alive)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        listening = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        self._listening = listening
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, port))
            listening.listen(WAITING)
        except OSError:
            await self.stop()
            raise
        assert self._runner.server is not None
        self._door.open(listening, self._runner.server)
        self.port = int(listening.getsockname()[1])

    async def stop(self) -> None:
        """Twice is harmless."""
        self._door.close()
        if self._listening is not None:
            self._listening.close()
        runner, client, self._runner, self._client = self._runner, self._client, None, None
        if runner is not None:
            await runner.cleanup()
        if client is not None:
            await client.close()

    @web.middleware
    async def _announced(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Tells the door of a request."""
        peer = None if request.transport is None else request.transport.get_extra_info("peername")
        with self._door.asked(peer, has_body=request.can_read_body) as is_complete:
            try:
                async with asyncio.timeout(BODY_S):
                    await request.read()  # kept for whoever reads it again
            except TimeoutError:
                return _refusal(408, f"the body did not arrive in {BODY_S:.0f} s", "request_timeout")
            is_complete()
            return await handler(request)

    async def _alive(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "nemorl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        found = _PATH.fullmatch(request.path)
        if found is None:
            return _refusal(404, f"{request.path} is no path of a model server", "not_found")
        name, body = _episode_of(request.headers.get(SESSION_HEADER), found["name"], await request.read())
        if name is None:
            return _refusal(
                400, "the call does not say to which episode it belongs: the agent dropped its metadata", "no_episode"
            )
        route = self.routes.get(name)
        if route is None:
            return _refusal(409, "the episode has ended", "episode_closed")
        return await self._answered(request, route.base_url + found["rest"], route, body)

    async def _answered(self, request: web.Request, url: str, route: Route, body: bytes) -> web.StreamResponse:
        assert self._client is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS}
        headers |= {"Authorization": f"Bearer {route.api_key}", "x-api-key": route.api_key}
        if route.seat:
            headers[SEAT_HEADER] = route.seat
        try:
            async with self._client.request(
                request.method, url, params=request.query, data=body or None, headers=headers
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HEADERS}
                response = web.StreamResponse(status=_status(answer), headers=kept)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except ClientError as error:
            return _refusal(502, f"the policy's gateway does not answer: {type(error).__name__}", "no_gateway")


def _status(answer: ClientResponse) -> int:
    """As the gateway says; 400 for a limit that stays, since Gym asks again and again after each 429."""
    is_final = answer.headers.get("x-should-retry") == "false"
    return 400 if answer.status == 429 and is_final else answer.status


def _episode_of(header: str | None, in_path: str | None, body: bytes) -> tuple[str | None, bytes]:
    """The episode's name, and the body without it."""
    try:
        told: Any = json.loads(body) if body else None
    except ValueError:  # the gateway says what is wrong with it
        told = None
    metadata = told.get("metadata") if isinstance(told, dict) else None
    if not isinstance(metadata, dict) or METADATA_KEY not in metadata:
        return in_path or header, body
    name = str(metadata.pop(METADATA_KEY))
    if not metadata:
        del told["metadata"]
    return in_path or header or name, json.dumps(told).encode()


def _refusal(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers={"x-should-retry": "false"})
