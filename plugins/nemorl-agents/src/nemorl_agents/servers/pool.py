"""The servers of a run: who gets a request, who has which weights, who comes and goes.

All of it runs on one event loop. Each server is tended by a task of its own: it is checked and given the current
weights before its first request, lost when it goes away, and taken in again, or what replaced it, when it answers. A
request whose server went away is made again, at another one or later at this one: its seed gives the same tokens.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError, DataError, NemorlError, boundary
from nemorl_rl.environments.loop_thread import in_thread
from nemorl_rl.serving.routing import Affinity, beginnings_of

from nemorl_agents.servers.checks import require_weights, true_logprobs
from nemorl_agents.servers.connection import GoneError
from nemorl_agents.servers.first_look import nobody_came, told_waiting
from nemorl_agents.servers.own_weights import OwnWeights
from nemorl_agents.servers.server import Server, State

if TYPE_CHECKING:
    from nemorl_agents.servers.checks import Identity
    from nemorl_agents.servers.config import ServerConfig
    from nemorl_agents.servers.dialects.base import Answer, Ask
    from nemorl_agents.servers.roster import Roster
    from nemorl_agents.servers.versions import Weights
    from nemorl_agents.servers.ways import Way

POLL_S = 1.0
"""How often lost servers and the list of wanted ones are looked at."""
MAX_ATTEMPTS = 5
"""Of one request, before the run ends with its server's last words."""
HANG_REST_S = 30.0
"""How long a server that did not answer in time gets nothing: its health may say that all is well."""
CHECKED_UPDATES = 2
"""Updates of a run after which servers that were not away are checked: the first that changes weights is the second."""
GIB = 2**30
MARK = "nemorl-"
"""Names of weights are ``nemorl-RUN:VERSION``."""


@dataclass(frozen=True)
class Span:
    """Part of a response."""

    version: int
    """Of the weights that drew it"""
    start: int
    """Place of its first token"""


class Pool:
    """The servers. Its coroutines run on one loop."""

    def __init__(self, options: ServerConfig, identity: Identity, roster: Roster, device: str) -> None:
        """
        Args:
            options: Of the backend.
            identity: The model that servers must serve.
            roster: Which ones are wanted.
            device: Of this process.
        """
        self._options, self._identity, self._roster, self._device = options, identity, roster, device
        self._way: Way = "folder"
        self._servers: dict[str, Server] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._affinity = Affinity[str]()
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Requests that found no free server."""
        self._own_weights = OwnWeights(identity, self._true_logprobs)
        self._run = f"{MARK}{uuid.uuid4().hex[:12]}"
        self._current: Weights | None = None
        self._updates = 0
        self._truth: tuple[int, list[float] | None] | None = None
        """Version, and log-probs of the probe tokens."""
        self._measuring = asyncio.Lock()
        self._trouble = ""
        """Why the list of wanted servers cannot be followed."""
        self._is_told = False
        """Whoever waits knows that no server is there."""
        self._said: dict[str, Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, weights: Weights | None, way: Way) -> None:
        """Take in all servers.

        Args:
            weights: They are given these. ``None``: they keep those that they were started with.
            way: In which servers are given weights.

        Raises:
            BackendError: One of them does not fit.
            DeadlineError: None of them came in time.
        """
        self._current, self._way = weights, way
        self._follow_roster()
        self._watcher = asyncio.create_task(self._watch())
        while any(server.state == "joining" for server in self._servers.values()):
            await self._wait(self._options.timeout_s)
        for server in self._servers.values():
            if server.error is not None:
                raise server.error
        await self._free_server(())

    async def publish(self, weights: Weights) -> None:
        """All servers that are there generate from these weights from now on, others from when they come.

        Raises:
            BackendError: No server can load them.
        """
        self._current, self._updates = weights, self._updates + 1
        await asyncio.gather(*(self._renew(server) for server in self._servers.values() if server.state == "ready"))
        self._require_hope()

    async def sample(self, ask: Ask) -> tuple[Answer, tuple[Span, ...]]:
        """One response, and which weights drew which part of it.

        Raises:
            DeadlineError: There was no server for too long.
            BackendError: A server refuses the request.
        """
        trouble, beginnings = "", beginnings_of(ask.token_ids)
        for _ in range(MAX_ATTEMPTS):
            server = await self._free_server(beginnings)
            self._affinity.remember(beginnings, server.url)
            server.in_progress += 1
            try:
                answer = await server.sample(ask)
            except GoneError as error:
                trouble = str(error)
                if error.hangs or not await server.is_healthy():
                    self._lose(server, trouble, rest_s=HANG_REST_S if error.hangs else 0.0)
                continue
            finally:
                server.in_progress -= 1
                self._wake(1)
            spans = self._spans(answer)
            if spans is not None:
                return answer, spans
            trouble = f"{server.url} no longer has the weights that it was given: it was started anew"
            self._lose(server, trouble)
        raise BackendError(
            f"a request failed {MAX_ATTEMPTS} times; the last time: {trouble}", fix="the server's own log says more"
        )

    async def close(self) -> None:
        """Leave the servers."""
        tasks = [*self._tasks.values(), *([self._watcher] if self._watcher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._watcher is not None:
            self._say()
        for server in self._servers.values():
            await server.connection.close()

    def _spans(self, answer: Answer) -> tuple[Span, ...] | None:
        """``None``: the server has other weights than it was given.

        Raises:
            BackendError: It has those of another run.
        """
        if self._current is None:
            if foreign := next((name for name, _ in answer.weights or () if name.startswith(MARK)), None):
                raise BackendError(
                    f"a server holds the weights that a run gave it ({foreign}), not those of its model",
                    fix="start it anew",
                )
            return (Span(0, 0),)
        if answer.weights is None:
            return (Span(self._current.version, 0),)
        names = [(*name.rpartition(":"), start) for name, start in answer.weights]
        if all(run == self._run for run, *_ in names):
            return tuple(Span(int(number), start) for _, _, number, start in names)
        if any(run.startswith(MARK) and run != self._run for run, *_ in names):
            raise BackendError(
                "another run gives weights to a server of this one", fix="give each run servers of its own"
            )
        return None

    # Who gets a request

    async def _free_server(self, beginnings: Sequence[Hashable]) -> Server:
        begin = time.monotonic()
        while True:
            loads = {
                url: server.in_progress
                for url, server in self._servers.items()
                if server.state == "ready" and server.in_progress < self._options.max_concurrency
            }
            if loads:
                return self._servers[self._affinity.choose(beginnings, loads)]
            self._require_hope()
            if any(server.state in ("ready", "loading") for server in self._servers.values()):
                begin = time.monotonic()  # it is busy, for as long as its own time limits allow
            left = begin + self._options.reconnect_timeout_s - time.monotonic()
            if left <= 0:
                raise nobody_came(self._options, self._account(), self._command())
            await self._wait(left)

    async def _wait(self, seconds: float) -> None:
        """Until a server is free or anything changed, or until then."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await asyncio.wait((place,), timeout=seconds)
        except asyncio.CancelledError:
            if place.done():
                self._wake(1)  # the turn that it was given is another's
            raise
        finally:
            if not place.done():
                self._waiting.remove(place)

    def _wake(self, count: int | None = None) -> None:
        """Let some of those who wait, or all, look again."""
        waiting = len(self._waiting) if count is None else min(count, len(self._waiting))
        for _ in range(waiting):
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)

    def _require_hope(self) -> None:
        """
        Raises:
            BackendError: All servers are refused: no wait would help.
        """
        errors = [server.error for server in self._servers.values()]
        if errors and all(errors):
            raise errors[0]  # type: ignore[misc]

    # Who comes and goes

    def _lose(self, server: Server, trouble: str, *, rest_s: float = 0.0) -> None:
        if server.state in ("ready", "loading", "joining"):
            server.rests_until = time.monotonic() + rest_s
            server.state, server.trouble = "lost", trouble
            server.lost += 1
            server.forget()
            self._affinity.forget(server.url)
            self._wake()

    def _refuse(self, server: Server, error: NemorlError) -> None:
        server.state, server.trouble, server.error = "refused", error.message, error
        self._wake()

    async def _tend(self, server: Server) -> None:
        """The life of one server in this run."""
        while True:
            if server.state in ("joining", "lost"):
                await self._take_in(server)
            elif server.state == "refused" and not await server.is_healthy():
                server.state, server.error = "lost", None  # what comes in its place may fit
                self._wake()
            await asyncio.sleep(POLL_S)

    async def _take_in(self, server: Server) -> None:
        try:
            if server.state == "lost" and (time.monotonic() < server.rests_until or not await server.is_healthy()):
                return
            server.state = "joining"
            with boundary(f"taking in {server.url}", passing=(GoneError,)):  # nobody looks at a task that ends
                await server.check()
                if self._current is None:
                    await self._own_weights.require(server)
                await self._give_weights(server, check=True)
        except GoneError as error:
            self._lose(server, str(error))
        except NemorlError as error:
            self._refuse(server, error)
        else:
            self._is_ready(server, "joining")

    async def _renew(self, server: Server) -> None:
        server.state = "loading"
        try:
            with boundary(f"giving {server.url} weights", passing=(GoneError,)):
                await self._give_weights(server, check=self._updates <= CHECKED_UPDATES)
        except GoneError as error:
            self._lose(server, str(error))
        except NemorlError as error:
            self._refuse(server, error)
        else:
            self._is_ready(server, "loading")

    def _is_ready(self, server: Server, after: State) -> None:
        """It has the weights, unless it was lost or dropped meanwhile: what became of it then holds."""
        if server.state == after:
            server.state, server.trouble, server.error = "ready", "", None
        self._wake()

    async def _give_weights(self, server: Server, *, check: bool) -> None:
        """Until it has the newest, which may change meanwhile."""
        while self._current is not None and server.weights != self._name(self._current):
            begin, weights = time.monotonic(), self._current
            await server.load(weights, self._way, self._name(weights))
            server.load_s = time.monotonic() - begin
            true = await self._true_logprobs(weights) if check and server.spoken.scores else None
            if true is not None:
                assert server.facts is not None, "it was checked before"
                require_weights(await server.score(), true, server.facts.dtype, server.url)

    def _name(self, weights: Weights) -> str:
        return f"{self._run}:{weights.version}"

    async def _true_logprobs(self, weights: Weights) -> list[float] | None:
        if weights.bytes > self._options.check_weights_gib * GIB:
            return None
        async with self._measuring:
            if self._truth is None or self._truth[0] != weights.version:
                self._truth = weights.version, await in_thread(true_logprobs, weights, self._identity.probe)
        return self._truth[1]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self._follow_roster()
                self._trouble = ""
            except DataError as error:  # somebody wrote into the file; the servers stay as they were
                self._trouble = error.message
            self._say()
            self._tell()

    def _tell(self) -> None:
        """Requests wait and every server is lost: say so, once until one comes."""
        is_deserted = bool(self._waiting) and all(server.state == "lost" for server in self._servers.values())
        if is_deserted and not self._is_told:
            told_waiting(self._options, self._account())
        self._is_told = is_deserted

    def _follow_roster(self) -> None:
        """Take in servers that are wanted, leave those that are not."""
        wanted = [url.rstrip("/") for url in self._roster.wanted(self._options.urls)]
        for url in wanted:
            if url not in self._servers:
                server = self._servers[url] = Server(url, self._options, self._identity, self._device)
                self._tasks[url] = asyncio.create_task(self._tend(server))
            elif self._servers[url].state == "leaving":  # it is wanted again before its last request is done
                self._servers[url].state = "lost"
        for url in [url for url in self._servers if url not in wanted]:
            server = self._servers[url]
            server.state, server.error = "leaving", None
            if server.in_progress == 0:
                self._tasks.pop(url).cancel()
                del self._servers[url]
                self._affinity.forget(url)
                self._wake()

    def _say(self) -> None:
        current = self._current
        state = {
            "engine": self._options.engine,
            "trouble": self._trouble,
            "configured": list(self._options.urls),
            "weights": None if current is None else current.version,
            "way": self._way,
            "weights_bytes": 0 if current is None else current.bytes,
            "write_s": 0.0 if current is None else round(current.seconds, 3),
            "servers": [server.as_json() for server in self._servers.values()],
        }
        if state != self._said:
            self._roster.report(state)
            self._said = state

    def _account(self) -> str:
        """The state of each server, for an error."""
        found = [f"{server.url} is {server.state}: {server.trouble}" for server in self._servers.values()]
        return "; ".join(found) or "none is wanted"

    def _command(self) -> str:
        return next((f"It is started with: {server.command}" for server in self._servers.values()), "")
