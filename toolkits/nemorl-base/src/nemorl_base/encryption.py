"""Beyond this machine nothing goes unencrypted, unless somebody says so: who listens and who calls asks here.

Whoever lets plain text through needs the site's leave as well (``unlock: plaintext``, :mod:`nemorl_base.site_policy`).
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from urllib.parse import urlsplit

from nemorl_base.errors import UsageError
from nemorl_base.permission import require
from nemorl_base.secrets import redacted

SHORTEST_KEY = 16
"""Characters of a key that keeps other machines out."""
PLAINTEXT = "plaintext"
ENCRYPTED = {"http": "https", "ws": "wss"}
"""Schemes of URLs that encrypt nothing, and what to use."""
PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


def is_loopback(host: str) -> bool:
    """All addresses of a host are this machine's own, which nobody else reaches. Asks the resolver for names."""
    if host == "":
        return False  # every address
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def names_loopback(url: str) -> bool:
    """A URL leads to this machine's own address, as far as it says so itself: no name is resolved."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def plaintext_problem(url: str) -> tuple[str, str] | None:
    """Why nothing should be sent to a URL unencrypted, and what to do; ``None`` where it is not."""
    scheme = urlsplit(url).scheme.lower()
    if scheme not in ENCRYPTED or names_loopback(url):
        return None
    what = f"{redacted(url)} is another machine, and {scheme} sends prompts, responses and keys unencrypted"
    return (
        what,
        f"use {ENCRYPTED[scheme]} (`nemorl certs` makes certificates), or allow it: plaintext",
    )


def origin(url: str) -> str:
    """Scheme, host and port of a URL, as they are compared: ``HTTPS://Node7./v1`` is ``https://node7:443``."""
    parts = urlsplit(url)
    try:
        given = parts.port
    except ValueError:  # no number
        return url
    port = given or PORTS.get(parts.scheme.lower())
    host = (parts.hostname or "").rstrip(".")
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme.lower()}://{host}" + (f":{port}" if port else "")


def require_safe_listening(what: str, host: str, *, encrypted: bool, key: str | None, plaintext: bool) -> None:
    """Let a server listen only where what it sends and who comes are kept safe.

    Args:
        what: The server, for messages.
        host: Address to listen on.
        encrypted: It has a certificate.
        key: That clients must send; ``None``: it makes keys of its own, which nobody can guess.
        plaintext: Somebody said that it may do without encryption.

    Raises:
        UsageError: It would be open to other machines.
    """
    if is_loopback(host):
        return
    if not encrypted and not plaintext:
        raise UsageError(
            f"{what} would listen on {host!r}, beyond this machine, without encryption",
            fix="give it a certificate (`nemorl certs make` makes one), or say that plain text will do",
        )
    if not encrypted:
        require("unlock", PLAINTEXT)
    if key is not None and len(key) < SHORTEST_KEY:
        raise UsageError(
            f"{what} would listen on {host!r} with a key of {len(key)} characters",
            fix=f"take at least {SHORTEST_KEY} that nobody can guess, or leave the key out: one is made",
        )


def require_certificate(what: str, certificate: Path | None, key: Path | None) -> None:
    """Refuse a certificate that a server could not use, before it listens.

    Args:
        what: The server, for messages.
        certificate: PEM; ``None``: it does without.
        key: PEM of its private key.

    Raises:
        UsageError: One without the other, or they are not a pair, or the key has a passphrase.
    """
    if (certificate is None) != (key is None):
        raise UsageError("a certificate and its private key go together", fix="give both, or neither")
    if certificate is None:
        return
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_passphrase)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UsageError(
            f"{what} cannot use {certificate} with {key}: {error}",
            fix="give a PEM certificate and its own private key (`nemorl certs make` makes both)",
        ) from error


def _no_passphrase() -> str:
    """Asked for a key's passphrase: OpenSSL would ask at the terminal, and a server has none."""
    raise ValueError("the private key has a passphrase")
