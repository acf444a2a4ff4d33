"""The ASGI application: whose a request is, its body within limits, and errors as the client's SDK takes them."""

from __future__ import annotations

import logging
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemorl_agents.tinker.calls import Call, Endpoint
from nemorl_agents.tinker.errors import ApiError, refusal
from nemorl_agents.tinker.routes_checkpoints import CheckpointRoutes
from nemorl_agents.tinker.routes_sampling import SamplingRoutes
from nemorl_agents.tinker.routes_sessions import SessionRoutes
from nemorl_agents.tinker.routes_training import TrainingRoutes
from nemorl_agents.tinker.service import Service

log = logging.getLogger(__name__)

PREFIX = "/api/v1"
MOST_BODY_BYTES = 64 << 20
"""Of a request, unpacked. Clients cut passes into parts of 5 MB."""
HUNG_UP = 499


def tinker_app(service: Service) -> Starlette:
    """The application of one service, which has been started."""
    checkpoints = CheckpointRoutes(service)
    groups = (SessionRoutes(service), TrainingRoutes(service), SamplingRoutes(service), checkpoints)
    routes = [Route(f"{PREFIX}/healthz", _health, methods=["GET"])]
    routes += [_route(service, endpoint) for group in groups for endpoint in group.endpoints()]
    routes += [_route(service, checkpoints.file_endpoint(), needs_key=False)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_place})
    app.router.redirect_slashes = False  # a redirect would send the body twice
    return app


def _route(service: Service, endpoint: Endpoint, *, needs_key: bool = True) -> Route:
    answered = partial(_answered, service, endpoint, needs_key)

    async def respond(request: Request) -> Response:
        return await answered(request)

    return Route(PREFIX + endpoint.path, respond, methods=[endpoint.method])


async def _answered(service: Service, endpoint: Endpoint, needs_key: bool, request: Request) -> Response:
    try:
        owner = service.keys.owner(request.headers.get("x-api-key", "")) if needs_key else ""
        raw = await _body(request)
        base_url = str(request.base_url).rstrip("/")
        found = await endpoint.handler(Call(owner, raw, request.path_params, request.query_params, base_url))
    except ApiError as error:
        return refusal(error)
    except (UnicodeError, OverflowError, RecursionError) as error:  # texts and numbers that JSON has and nothing else
        return refusal(ApiError(422, f"the request cannot be read ({type(error).__name__})"))
    except ClientDisconnect:
        return Response(status_code=HUNG_UP)
    except Exception as error:
        log.exception("a Tinker server could not answer %s", endpoint.path)
        return refusal(ApiError(500, f"the server failed ({type(error).__name__})", may_retry=True))
    if isinstance(found, Response):
        return found
    return Response(status_code=204) if found is None else JSONResponse(found)


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY_BYTES:
            raise _too_long()
        parts.append(part)
    raw = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return raw
    if encoding != "zstd":
        raise ApiError(415, f"bodies in {encoding[:50]} are not taken", fix="send them in zstd, or as they are")
    return _unpacked(raw)


def _unpacked(raw: bytes) -> bytes:
    import zstandard  # comes with the client's wheel, as the messages do

    try:
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            found: bytes = reader.read(MOST_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise ApiError(400, "the body is no zstd") from error
    if len(found) > MOST_BODY_BYTES:
        raise _too_long()
    return found


def _too_long() -> ApiError:
    return ApiError(413, f"the body has more than {MOST_BODY_BYTES:,} bytes", fix="send fewer or shorter sequences")


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _no_such_place(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]} is not served"
    return refusal(ApiError(error.status_code, what, fix="docs/tinker.md lists what is"))
