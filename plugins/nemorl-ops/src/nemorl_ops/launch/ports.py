"""A block of ports for one node's part of Ray, so that two jobs on a machine never share one.

Ray's ports are fixed once the block is chosen, and all lie below those that the system gives to clients: none is taken
between a node's start and a worker's. A block is claimed by listening on its first port, which one process can do at a
time and which ends with it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from nemorl.errors import ResourceError

FIRST = 10_000
LAST = 15_000
"""Below the ports that ``nemorl.resources.ports`` draws for a rendezvous, and below any system's ephemeral range."""
SIZE = 200
SERVERS = (
    "port",
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "ray-client-server-port",
)
"""Options of ``ray start``, in the order of their ports; the first and the last are the head's alone."""
FIRST_WORKER = 20
"""Offset of the first port of Ray's workers."""


@dataclass(frozen=True)
class PortBlock:
    """Ports that belong to this process while it holds ``claim``."""

    first: int
    claim: socket.socket

    @classmethod
    def claimed(cls) -> PortBlock:
        """The first block of this machine in which nobody listens.

        Raises:
            ResourceError: all are taken.
        """
        for first in range(FIRST, LAST, SIZE):
            claim = _listening(first)
            if claim is None:
                continue
            probes = [_listening(first + 1 + offset) for offset in range(len(SERVERS))]
            for probe in probes:
                if probe is not None:
                    probe.close()
            if all(probe is not None for probe in probes):
                return cls(first, claim)
            claim.close()
        raise ResourceError(
            f"each of the {(LAST - FIRST) // SIZE} blocks of ports from {FIRST} to {LAST} of this machine is in use",
            fix="end jobs on it, or Ray processes that they left (`ps -ef | grep raylet`)",
        )

    @property
    def head(self) -> int:
        """Port of Ray's head."""
        return self.first + 1

    def options(self, *, head: bool) -> list[str]:
        """Options of ``ray start``."""
        servers = SERVERS if head else SERVERS[1:-1]
        numbered = [f"--{name}={self.head + SERVERS.index(name)}" for name in servers]
        workers = (self.first + FIRST_WORKER, self.first + SIZE - 1)
        return [*numbered, f"--min-worker-port={workers[0]}", f"--max-worker-port={workers[1]}"]

    def release(self) -> None:
        self.claim.close()


def _listening(port: int) -> socket.socket | None:
    """A socket that holds the port; ``None`` where somebody has it."""
    server = socket.socket()
    try:
        server.bind(("", port))
        server.listen(1)
    except OSError:
        server.close()
        return None
    return server
