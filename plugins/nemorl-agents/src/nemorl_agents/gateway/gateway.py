"""Gateway: one HTTP server for the episodes of a process, on a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Self

from nemorl.errors import UsageError
from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.agents.gateways import MAX_BODY_BYTES, GatewayRules
from nemorl_trust.audit.recording import record
from nemorl_trust.http_server import HttpServer
from nemorl_trust.listening import Place

from nemorl_agents.gateway.access import Access, AccessControl
from nemorl_agents.gateway.episodes import OpenEpisode, Traffic
from nemorl_agents.gateway.server import Server

POLICY = "policy"
"""The name of the policy where none is given"""


@dataclass(frozen=True, slots=True)
class GatewayOptions(Place):
    """How a gateway listens, and what it lets pass."""

    models: tuple[str, ...] = (POLICY,)
    """Names of models that are answered; ``*`` stands for any characters. The name is echoed and selects nothing."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of bodies that are left out, whatever they ask for. For agents that cannot be told to omit them."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Longest body of a request. Clients send the images of the whole history with each."""
    max_concurrent_calls: int = 64
    """Requests of one episode that are answered at the same time; what comes on top is told to come again."""
    body_timeout_s: float = 30.0
    """Longest time for a body to arrive, in seconds."""
    quiet_s: float = 5.0
    """Seconds without an event after which a stream gets a comment, so that nobody takes it for dead. A stream begins
    after as many, or with the answer if that is earlier: errors until then have a status of their own."""

    def answers(self, model: str) -> bool:
        """A model of this name is served."""
        return any(_fits(model, pattern) for pattern in self.models)

    @property
    def named(self) -> tuple[str, ...]:
        """The names that stand for themselves."""
        return tuple(name for name in self.models if "*" not in name)

    @property
    def model(self) -> str:
        """A name that is answered."""
        return self.named[0] if self.named else self.models[0].replace("*", POLICY)

    @classmethod
    def of(cls, rules: GatewayRules) -> Self:
        """At a free port of this machine; ``policy`` is answered too."""
        models = tuple(dict.fromkeys([*rules.models, POLICY]))
        return cls(models=models, ignored_fields=rules.ignored_fields, max_body_bytes=rules.max_body_bytes)


def _fits(model: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), model, re.DOTALL) is not None


IDLE_S = 120
"""Seconds that a connection without requests is kept: longer than clients keep theirs, or one would send a request into
it while it is being closed."""
RECORDED = ("requests", "retries", "refused", "disconnects", "failures")
"""Counts that go into the audit log when a gateway ends."""
ENDING_S = 2
"""Seconds for answers that are being sent when the gateway is shut down."""
LATEST = 1024
"""Episodes that have ended and whose last requests may not have been answered yet: of older ones sums are kept."""


class Gateway:
    """The policy over HTTP: each episode has an address and a key of its own.

    Example:
        >>> with Gateway() as gateway:  # doctest: +SKIP
        ...     access = gateway.open(policy)
        ...     await run_agent(env=access.variables())
        ...     traffic = gateway.close(access)
    """

    def __init__(self, options: GatewayOptions | GatewayRules | None = None) -> None:
        """
        Args:
            options: Where it listens, and what it lets pass. Rules alone, or nothing: on this machine, at a free port.

        Raises:
            UsageError: It cannot listen there.
        """
        self._options = GatewayOptions.of(options) if isinstance(options, GatewayRules) else options or GatewayOptions()
        self._doors = AccessControl()
        self._socket = _listening(self._options)
        self._served_at = self.address
        self._traffic: deque[Traffic] = deque()
        """Of episodes that ended last"""
        self._counts: Counter[str] = Counter()
        """Of those before"""
        self._server = HttpServer(
            "the gateway",
            Server(self._doors, self._options).app,
            idle_s=IDLE_S,
            ending_s=ENDING_S,
            place=self._options,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nemorl-gateway", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, e.g. ``http://127.0.0.1:41234``."""
        return self._options.url(self._socket)

    def open(self, policy: EpisodePolicy) -> Access:
        """Let an episode's agent reach its policy, from any thread.

        Args:
            policy: Answers it.
        """
        episode = OpenEpisode(policy, self._options)
        name, key = self._doors.admit(episode)
        return self._access(f"{self.address}/e/{name}", name, key)

    def open_at_root(self, policy: EpisodePolicy, *, key: str | None = None) -> Access:
        """Let whoever has the key reach a policy at the gateway's own address.

        Args:
            policy: Answers.
            key: Unset: one that nobody can guess.
        """
        self._options.require_safe("the gateway", key)
        name, key = self._doors.admit(OpenEpisode(policy, self._options), name="", key=key)
        return self._access(self.address, name, key)

    def traffic(self, access: Access) -> Traffic:
        """Counts of an open episode's requests so far; all zeros for one that is closed."""
        episode = self._doors.find(access.name)
        return Traffic() if episode is None else episode.traffic

    def close(self, access: Access) -> Traffic:
        """End an episode, from any thread: what it has under way is cancelled, and what comes gets 409.

        Returns:
            What its requests came to. All zeros where it was closed before.
        """
        episode = self._doors.dismiss(access.name)
        return Traffic() if episode is None else self._ended(episode)

    def shutdown(self) -> None:
        """Close all episodes and stop listening. Calling it twice is harmless."""
        if not self._thread.is_alive():
            return
        for name in self._doors.names():
            episode = self._doors.dismiss(name)
            if episode is not None:
                self._ended(episode)
        self._server.should_exit = True
        self._thread.join()
        while self._traffic:
            self._add_up(self._traffic.popleft())
        if self._counts:
            record("calls_served", {"address": self._served_at, **self._counts})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _ended(self, episode: OpenEpisode) -> Traffic:
        self._loop.call_soon_threadsafe(self._end, episode)
        return episode.traffic

    def _end(self, episode: OpenEpisode) -> None:
        episode.calls.close()
        self._traffic.append(episode.traffic)
        if len(self._traffic) > LATEST:
            self._add_up(self._traffic.popleft())

    def _add_up(self, traffic: Traffic) -> None:
        self._counts.update(episodes=1, **{name: getattr(traffic, name) for name in RECORDED})

    def _access(self, base_url: str, name: str, key: str) -> Access:
        return Access(base_url, key, self._options.model, name)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))
        finally:
            self._socket.close()
            self._loop.close()


def require_address(options: GatewayOptions) -> None:
    """Refuse options with which nobody can listen.

    Raises:
        UsageError: The address is another machine's, or the port is taken.
    """
    _listening(options).close()


def _listening(options: GatewayOptions) -> socket.socket:
    if not options.models:
        raise UsageError("the gateway answers to no model's name", fix="give at least one in `models`, or '*'")
    return options.listen("the gateway", waiting=2048)
