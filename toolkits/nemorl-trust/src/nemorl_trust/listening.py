"""Where a server of ours listens, and that it is safe there: for others than this machine, it takes a certificate."""

from __future__ import annotations

import resource
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemorl.resources.ports import listening_socket

from nemorl_trust.encryption import require_certificate, require_safe_listening


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens.

    >>> place = Place()
    >>> with place.listen("an example", waiting=1) as listening:
    ...     place.url(listening).rpartition(":")[0]
    'http://127.0.0.1'
    """

    host: str = "127.0.0.1"
    """The address to listen on. Any other than a loopback one lets other machines in: it takes a certificate, or
    ``plaintext``."""
    port: int = 0
    """0: the system chooses a free one."""
    tls_certificate: Path | None = None
    """PEM certificate, with those between it and its authority. It and its key: clients come by https alone."""
    tls_key: Path | None = None
    """PEM private key of the certificate."""
    plaintext: bool = False
    """Listen beyond this machine without a certificate all the same: what passes can be read and changed on its way."""

    def require_safe(self, who: str, key: str | None = None) -> None:
        """Refuse to let others read along, or guess ``key``."""
        encrypted = self.tls_certificate is not None
        require_safe_listening(who, self.host, encrypted=encrypted, key=key, plaintext=self.plaintext)

    def listen(self, who: str, *, waiting: int) -> socket.socket:
        """A socket that takes connections from now on; so many of them wait until a server runs.

        Raises:
            UsageError: It cannot listen there, or others would read along.
        """
        require_certificate(who, self.tls_certificate, self.tls_key)
        self.require_safe(who)
        return listening_socket(who, self.host, self.port, waiting=waiting)

    def url(self, listening: socket.socket) -> str:
        """Where a socket of ``listen`` is reached, e.g. ``http://127.0.0.1:41234``."""
        host, port = listening.getsockname()[:2]
        scheme = "http" if self.tls_certificate is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


HERE = Place()


ENOUGH = 65_536
"""Some programs that are started from here close every number up to the limit, which may be a billion."""


def allow_more_open_files() -> None:
    """Raise the soft limit, often 1024, as far as the hard one lets it. Where the system says no, it stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
