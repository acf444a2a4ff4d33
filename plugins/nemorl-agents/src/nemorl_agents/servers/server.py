"""One server as a run sees it: whether it is there and fits, which weights it has, how busy it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from nemorl.errors import BackendError, NemorlError

from nemorl_agents.servers.checks import require_sampling
from nemorl_agents.servers.connection import Connection, GoneError
from nemorl_agents.servers.dialects import dialect
from nemorl_agents.servers.dialects.base import Answer, Ask, Facts, Wanted
from nemorl_agents.servers.sending import Link
from nemorl_agents.servers.ways import Way, require_way, way_problem

if TYPE_CHECKING:
    from nemorl_agents.servers.checks import Identity
    from nemorl_agents.servers.config import ServerConfig
    from nemorl_agents.servers.versions import Weights

State = Literal["joining", "ready", "loading", "lost", "refused", "leaving"]
"""``joining``: being checked and given the weights. ``loading``: ready, and being given new ones. ``lost``: away, and
looked after. ``refused``: there, and not fit; looked at again when it was away. ``leaving``: gets no more requests."""


STARTING = (502, 503, 504)
"""Answers of a server, or of what stands before it, until it serves."""
NEEDS: Mapping[Way, str] = {
    "folder": "generation.backend.weights_folder must be seen by the run and by the server under one path",
    "distributed": "the server's processes must reach the run's address, else set generation.backend.weights: folder",
    "tensor": "the server must see the run's GPU, else set generation.backend.weights: distributed",
}


@contextmanager
def _sense(url: str) -> Iterator[None]:
    """An answer of another form than its engine's is an error of the server, not of what reads it."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BackendError(
            f"{url} answers in a form that is not its engine's: {error}",
            fix="generation.backend.engine must name the software behind generation.backend.urls",
        ) from error


class Server:
    """One of them. Everything here runs on one event loop."""

    def __init__(self, url: str, options: ServerConfig, identity: Identity, device: str) -> None:
        self.url = url.rstrip("/")
        self.spoken = dialect(options.engine)
        policy = identity.policy
        wanted = Wanted(
            policy.model_name, policy.max_sequence_tokens, policy.precision, urlsplit(self.url).netloc, device
        )
        self.command = self.spoken.command(wanted)
        self.connection = Connection(self.url, options, self.command)
        self.state: State = "joining"
        self.trouble = ""
        """Why it is lost or refused"""
        self.error: NemorlError | None = None
        """The same, of one that is refused"""
        self.facts: Facts | None = None
        self.weights: str | None = None
        """Name of those that it was given last"""
        self.in_progress = 0
        self.rests_until = 0.0
        """Moment of ``time.monotonic()`` before which it is not taken in again"""
        self.served, self.lost = 0, 0
        """Responses, and times that it went away"""
        self.load_s = 0.0
        """Seconds that its last load took"""
        self._identity, self._options = identity, options
        self._link = Link(self.url, options.timeout_s)
        self._device = device

    async def check(self) -> None:
        """Find out what it is.

        Raises:
            GoneError: It is not there.
            BackendError: It does not fit.
        """
        with _sense(self.url):
            self.facts = await self._found()
            await self._identity.require_fit(
                self.connection, self.spoken, self.facts, url=self.url, command=self.command
            )

    async def _found(self) -> Facts:
        try:
            return await self.spoken.facts(self.connection)
        except GoneError as error:
            if self.facts is not None or error.status in (None, *STARTING):
                raise
            # Asked what it is for the first time, it fails: no wait would mend that.
            raise BackendError(f"{error}", fix="see its own log, and start it anew") from None

    async def load(self, weights: Weights, way: Way, name: str) -> None:
        """Give it weights.

        Raises:
            GoneError: It is not there, or went away.
            BackendError: It cannot load them, or takes none in this way.
        """
        assert self.facts is not None, "it is checked before it is given weights"
        require_way(way, self.spoken, self.facts, self.url, self.command)
        problem = way_problem(way, self.spoken, self._options, (self.url,), self._device)
        if problem is not None:  # it joined a run whose other servers can be given weights so
            raise BackendError(problem[0], fix=problem[1])
        try:
            await {"folder": self._read, "distributed": self._receive, "tensor": self._open}[way](weights, name)
        except GoneError as error:
            self._link.close()
            if not await self.is_healthy():
                raise
            raise BackendError(
                f"{self.url} cannot load weights {weights.version} by {way}: {error}",
                fix=f"{NEEDS[way]}; then start the server anew: {self.command}",
            ) from None
        except BackendError:
            self._link.close()
            raise
        self.weights = name

    def forget(self) -> None:
        """It went away: whoever answers next is another process."""
        self.weights = None
        self._link.close()

    async def _read(self, weights: Weights, name: str) -> None:
        assert self.facts is not None
        await self.spoken.load(self.connection, self.facts, weights.folder, name)

    async def _receive(self, weights: Weights, name: str) -> None:
        spoken, connection, facts, tensors = self.spoken, self.connection, self.facts, weights.tensors
        assert facts is not None

        async def send(names: Sequence[str]) -> None:
            await self._link.send([tensors[each] for each in names])

        if not self._link.is_open:
            carrier, opener = spoken.carrier(facts, self._device)
            await self._link.open(facts.ranks, opener, carrier, lambda meeting: spoken.join(connection, facts, meeting))
        try:
            await spoken.receive(connection, facts, tensors, send, name)
        except RuntimeError as error:  # torch's, of a broadcast
            raise GoneError(f"{self.url} went away while it was sent weights: {str(error).splitlines()[0]}") from None

    async def _open(self, weights: Weights, name: str) -> None:
        assert self.facts is not None
        await self.spoken.open_handles(self.connection, self.facts, weights.tensors, name)

    async def score(self) -> list[float]:
        """Log-probs of the probe tokens."""
        assert self.facts is not None, "it is checked first"
        with _sense(self.url):
            return await self.spoken.score(self.connection, self.facts, self._identity.probe)

    async def sample(self, ask: Ask) -> Answer:
        """One response.

        Raises:
            GoneError: It went away.
            BackendError: It refuses the request, or its log-probs would be of another distribution.
        """
        assert self.facts is not None, "it is checked first"
        require_sampling(self.facts, ask.sampling, self.url)
        with _sense(self.url):
            answer = await self.spoken.sample(self.connection, self.facts, ask)
        self.served += 1
        return answer

    async def is_healthy(self) -> bool:
        return await self.connection.is_healthy(self.spoken.health)

    def as_json(self) -> dict[str, Any]:
        """For ``nemorl engines list``."""
        return {
            "url": self.url,
            "state": self.state,
            "trouble": self.trouble,
            "version": self.facts.version if self.facts else None,
            "weights": self.weights.rpartition(":")[2] if self.weights else None,
            "in_progress": self.in_progress,
            "served": self.served,
            "lost": self.lost,
            "load_s": round(self.load_s, 3),
        }
