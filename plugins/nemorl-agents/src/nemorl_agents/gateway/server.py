"""The gateway's handling of a request: whose it is, what it asks, waiting for the answer, and sending it.

A request waits for three things at once: the answer of its call, the client's hanging up, and, where it wants a stream,
the moment at which the stream begins without an answer so that nobody takes it for dead.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nemorl_agents.gateway import rewards
from nemorl_agents.gateway.access import AccessControl
from nemorl_agents.gateway.apis.anthropic import AnthropicErrors, CountTokens, Messages
from nemorl_agents.gateway.apis.base import Api, ErrorWords, OpenAIErrors, new_id
from nemorl_agents.gateway.apis.chat import ChatCompletions
from nemorl_agents.gateway.apis.completions import Completions
from nemorl_agents.gateway.apis.responses import Responses
from nemorl_agents.gateway.body import flag_at, parsed, text_at
from nemorl_agents.gateway.calls import Call
from nemorl_agents.gateway.episodes import SEAT_HEADER, OpenEpisode
from nemorl_agents.gateway.errors import RequestError, as_request_error, bad_field
from nemorl_agents.gateway.fields import checked

if TYPE_CHECKING:
    from nemorl_agents.gateway.gateway import GatewayOptions


APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), Messages(), CountTokens(), Completions())
Respond = Callable[[Request, OpenEpisode, str], Awaitable[Response]]
"""From a request, whose episode is known, and its id to its response"""
EPISODE = "/e/{episode}"
"""Where episodes have their addresses; one may be without (``nemorl serve``)."""
DRAINED = 16
"""Times the longest body that is read of one that is too long: who still writes would not see the answer."""
HUNG_UP = 499
COMMENT = b": the policy is at work\n\n"


class Server:
    """The gateway as an ASGI application. It lives on one event loop."""

    def __init__(self, doors: AccessControl, options: GatewayOptions) -> None:
        self._doors, self._options = doors, options
        self._noted: set[str] = set()
        """Ignored fields of which the log has been told"""
        routes = [Route("/healthz", self._health, methods=["GET"])]
        for start in (EPISODE, ""):
            for api in APIS:
                answer = partial(self._respond, api)
                routes += [Route(start + api.path, self._endpoint(answer, api.errors), methods=["POST"])]
            for path in rewards.PATHS:
                routes += [Route(start + path, self._endpoint(self._reward, OpenAIErrors()), methods=["POST"])]
            routes += [Route(f"{start}/v1/models", self._models, methods=["GET"])]
            routes += [Route(f"{start}/v1/models/{{model:path}}", self._models, methods=["GET"])]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: self._no_such_place})
        self.app.router.redirect_slashes = False  # a redirect would send the body twice

    # What needs no policy

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        try:
            self._episode(request)
            wanted = request.path_params.get("model")
            if wanted is not None and not self._options.answers(wanted):
                raise self._no_such_model(wanted)
        except RequestError as error:
            return _refusal(error, _words(request), new_id("req_"))
        names = [wanted] if wanted is not None else [*self._options.named]
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "nemorl"} for name in names]
        return JSONResponse(models[0] if wanted is not None else {"object": "list", "data": models})

    async def _no_such_place(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            told = RequestError(405, f"{request.method} is not served here", fix="use POST", code="not_found")
        else:
            what = f"nothing is served at {request.url.path[:200]}"
            paths = ", ".join([*(api.path for api in APIS), rewards.PATHS[0]])
            told = RequestError(404, what, fix=f"paths are {paths}", code="not_found")
        return _refusal(told, _words(request), new_id("req_"))

    # Calls of the policy

    def _endpoint(self, respond: Respond, words: ErrorWords) -> Any:
        async def endpoint(request: Request) -> Response:
            request_id = new_id("req_")
            episode: OpenEpisode | None = None
            try:
                episode = self._episode(request)
                episode.traffic.requests += 1
                return await respond(request, episode, request_id)
            except ClientDisconnect:
                if episode is not None:
                    episode.traffic.disconnects += 1
                return Response(status_code=HUNG_UP)
            except Exception as error:
                return _refusal(_noted(error, episode), words, request_id)

        return endpoint

    async def _respond(self, api: Api, request: Request, episode: OpenEpisode, request_id: str) -> Response:
        raw = await self._body(request)
        body = checked(parsed(raw), api.fields, self._options.ignored_fields, self._note_ignored)
        if "model" not in body:
            raise bad_field("model", "is missing", fix="name the model", code="missing")
        model = text_at(body["model"], "model")
        if not self._options.answers(model):
            raise self._no_such_model(model)
        streams = flag_at(body.get("stream", False), "stream")
        call = self._call(api, request, episode, raw, body)
        try:
            is_done = await self._wait(call, request, quiet_s=self._options.quiet_s if streams else None)
            if is_done:
                answer = call.answer()
                if not streams or answer.events is None:
                    return JSONResponse(answer.payload, headers={"x-request-id": request_id})
        except BaseException:
            episode.calls.leave(call)
            raise
        headers = {"x-request-id": request_id, "cache-control": "no-cache", "x-accel-buffering": "no"}
        return _Stream(self._events(call, api, episode, request_id), call, episode, headers)

    async def _reward(self, request: Request, episode: OpenEpisode, request_id: str) -> Response:
        key, is_retry = request.headers.get("idempotency-key"), _is_retry(request)
        given, is_new = episode.answers.reward(episode.policy, await self._body(request), key=key, is_retry=is_retry)
        episode.traffic.rewards += is_new
        episode.traffic.retries += not is_new
        return JSONResponse(given, headers={"x-request-id": request_id})

    def _call(self, api: Api, request: Request, episode: OpenEpisode, raw: bytes, body: dict[str, Any]) -> Call:
        """The work that this request waits for: that of an earlier one where it is marked as a retry."""
        seat = request.headers.get(SEAT_HEADER, "")
        digest = hashlib.blake2b(f"{api.path}\0{seat}\0".encode() + raw, digest_size=16).digest()
        if _is_retry(request):
            earlier = episode.calls.earlier(digest)
            if earlier is not None:
                episode.traffic.retries += 1
                return earlier
        return episode.calls.begin(digest, api.answer(body, episode.seated(seat)))

    async def _wait(self, call: Call, request: Request, *, quiet_s: float | None) -> bool:
        """Until the call is done, or for so long; returns whether it is done.

        Raises:
            ClientDisconnect: Nobody waits for it any more.
        """
        gone = asyncio.create_task(_hung_up(request))
        try:
            await asyncio.wait({call.task, gone}, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not call.task.done():
                raise ClientDisconnect
            return call.task.done()
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone

    async def _events(self, call: Call, api: Api, episode: OpenEpisode, request_id: str) -> AsyncIterator[bytes]:
        while not call.task.done():
            yield COMMENT
            await asyncio.wait({call.task}, timeout=self._options.quiet_s)
        try:
            answer = call.answer()
            assert answer.events is not None, "only answers with events are streamed"
            for event in answer.events():
                yield event
        except Exception as error:
            yield api.errors.event(_noted(error, episode), request_id)

    # What a request says

    def _episode(self, request: Request) -> OpenEpisode:
        return self._doors.enter(request.path_params.get("episode", ""), _key(request))

    async def _body(self, request: Request) -> bytes:
        """The body, within the limits of size and time."""
        most, seconds = self._options.max_body_bytes, self._options.body_timeout_s
        parts: list[bytes] = []
        size, began_s = 0, time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    elif size > DRAINED * most:
                        break
        except TimeoutError:
            waited_s = time.monotonic() - began_s
            raise RequestError(
                408, f"the body did not arrive in {waited_s:.0f} s", fix="send it at once", code="request_timeout"
            ) from None
        if size > most:
            raise RequestError(
                413,
                f"the body has more than {most:,} bytes",
                fix="shorten the history, send smaller images, or raise environment.gateway.max_body_mib",
                code="request_too_large",
            )
        return b"".join(parts)

    def _note_ignored(self, name: str) -> None:
        if name not in self._noted:
            self._noted.add(name)
            logging.getLogger(__name__).warning("agents send `%s`, which is ignored as configured", name)

    def _no_such_model(self, model: str) -> RequestError:
        served = ", ".join(self._options.models)
        return RequestError(
            404,
            f"The model `{model[:100]}` does not exist",
            fix=f"served is: {served} (environment.gateway.models)",
            code="model_not_found",
            param="model",
        )


class _Stream(StreamingResponse):
    """Events for one request, which leaves its call when they end, also where they never began."""

    def __init__(self, events: AsyncIterator[bytes], call: Call, episode: OpenEpisode, headers: dict[str, str]) -> None:
        super().__init__(self._counted(events), media_type="text/event-stream", headers=headers)
        self._call, self._episode = call, episode
        self._is_whole = False

    async def _counted(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for event in events:
            yield event
        self._is_whole = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._episode.traffic.disconnects += not self._is_whole
            self._episode.calls.leave(self._call)


async def _hung_up(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_retry(request: Request) -> bool:
    """The client's SDK says that it sends this again."""
    retries = request.headers.get("x-stainless-retry-count", "0")
    return retries.isdecimal() and int(retries[:9]) > 0


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _words(request: Request) -> ErrorWords:
    """Of the API that a client seems to speak, where its path does not say."""
    is_anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.url.path
    return AnthropicErrors() if is_anthropic else OpenAIErrors()


def _noted(error: Exception, episode: OpenEpisode | None) -> RequestError:
    told = as_request_error(error)
    if episode is not None and told.status >= 500:
        episode.traffic.failures += 1
        episode.traffic.failure = episode.traffic.failure or error
    elif episode is not None:
        episode.traffic.refused += 1
    return told


def _refusal(error: RequestError, words: ErrorWords, request_id: str) -> Response:
    headers = {**error.headers, "x-request-id": request_id}
    if error.status in (408, 413):
        headers["connection"] = "close"
    return JSONResponse(words.body(error, request_id), status_code=error.status, headers=headers)
