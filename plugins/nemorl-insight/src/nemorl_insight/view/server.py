"""The server as an ASGI application: the page, and a JSON API over the runs. It changes nothing."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from anyio.to_thread import run_sync
from nemorl.errors import UsageError
from nemorl_cli.report.viewing import page
from nemorl_cli.report.viewing.queries import MOST, Wanted
from nemorl_cli.report.viewing.settings import differences_between
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from nemorl_insight.view.guard import Guard
from nemorl_insight.view.stream import events, positions_of, written
from nemorl_insight.view.watched import WatchedRun

Answer = Callable[[Request], Any]
LONGEST_SEARCH = 1000


class Server:
    """Answers about some runs."""

    def __init__(
        self,
        runs: Sequence[WatchedRun],
        *,
        hosts: Collection[str] | None,
        token: str | None = None,
        once: set[str] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            runs: In the order given by the user.
            hosts: See :class:`nemorl_insight.view.guard.Guard`.
            token: Likewise.
            once: Likewise.
            is_over: The server ends: streams end too.
        """
        self._runs, self._is_over = runs, is_over
        answers = {"overview": self._overview, "extra": self._extra, "steps": self._steps, "responses": self._responses}
        answers |= {"response": self._response, "differences": self._differences}
        routes = [
            Route("/", _file(page.served, "text/html")),
            Route("/page.js", _file(page.script, "text/javascript")),
            Route("/page.css", _file(page.style, "text/css")),
            Route("/api/info", _json(self._info)),
            Route("/api/stream", self._stream),
            Route("/api/runs/{run:int}/media/{digest}", self._media),
            *(Route(f"/api/runs/{{run:int}}/{name}", _json(answer)) for name, answer in answers.items()),
        ]
        guard = Middleware(Guard, hosts=hosts, token=token, once=once)
        self.app = Starlette(routes=routes, middleware=[guard, Middleware(GZipMiddleware, minimum_size=4096)])

    def _info(self, request: Request) -> Any:
        runs = [{"name": name} for name in names_of(self._runs)]
        title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
        position = written([run.position for run in self._runs])
        return {"title": title, "tiles": [], "runs": runs, "live": True, "position": position}

    def _overview(self, request: Request) -> Any:
        return self._run(request).overview()

    def _extra(self, request: Request) -> Any:
        return self._run(request).extra()

    def _steps(self, request: Request) -> Any:
        return self._run(request).steps()

    def _responses(self, request: Request) -> Any:
        given = request.query_params
        step = given.get("step")
        wanted = Wanted(
            split=given.get("split"),
            step=None if step is None else _number(step, "step"),
            only=[name for name in given.get("only", "").split(",") if name],
            search=given.get("search", "")[:LONGEST_SEARCH],
            sort=given.get("sort", ""),
            descending=given.get("descending", "true") != "false",
            limit=_number(given.get("limit", str(MOST)), "limit"),
            offset=_number(given.get("offset", "0"), "offset"),
        )
        return self._run(request).responses(wanted)

    def _response(self, request: Request) -> Any:
        given = request.query_params
        sample_id, split, step = (given.get(name, "") for name in ("id", "split", "step"))
        return self._run(request).response(sample_id, split, _number(step, "step"))

    async def _media(self, request: Request) -> Response:
        """An image or a sound that records show; ``?small=1``: an image's thumbnail."""
        is_small = request.query_params.get("small") == "1"
        try:
            found = await run_sync(self._run(request).media, request.path_params["digest"], is_small)
        except UsageError as error:
            return Response(str(error), 404, media_type="text/plain")
        path, media_type = found
        return FileResponse(path, media_type=media_type)

    def _differences(self, request: Request) -> Any:
        other = self._at(_number(request.query_params.get("other", ""), "other"))
        return differences_between(self._run(request).path, other.path)

    async def _stream(self, request: Request) -> Response:
        given = request.headers.get("last-event-id") or request.query_params.get("from", "")
        positions = positions_of(given, self._runs)
        return StreamingResponse(events(self._runs, positions, self._is_over), media_type="text/event-stream")

    def _run(self, request: Request) -> WatchedRun:
        return self._at(request.path_params["run"])

    def _at(self, number: int) -> WatchedRun:
        if not 0 <= number < len(self._runs):
            raise UsageError(f"there is no run {number}", fix=f"runs count from 0 to {len(self._runs) - 1}")
        return self._runs[number]


def names_of(runs: Sequence[WatchedRun]) -> list[str]:
    """Names of runs; those of one name get the folder above it."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{run.path.resolve().parent.name}/{name}"
        for name, run in zip(names, runs, strict=True)
    ]


def _json(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose answer is computed beside the event loop."""

    async def endpoint(request: Request) -> Response:
        status = 200
        try:
            body = await run_sync(answer, request)
        except UsageError as error:
            status, body = 400, {"error": str(error)}
        except Exception as error:  # the page says so; the server goes on
            status, body = 500, {"error": str(error) or type(error).__name__}
        text = json.dumps(body, allow_nan=False, separators=(",", ":"))
        return Response(text, status, media_type="application/json")

    return endpoint


def _file(text: Callable[[], str], media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return Response(text(), media_type=media_type)

    return endpoint


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"{name} = {text[:40]!r} is no number", fix="give a whole number")
    return int(text)
