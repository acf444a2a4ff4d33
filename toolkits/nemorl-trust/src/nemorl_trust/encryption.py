"""Beyond this machine nothing goes unencrypted, unless somebody says so: who listens and who calls asks here.

Whoever lets plain text through needs the site's leave as well (``unlock: plaintext``,
:mod:`nemorl_trust.site_policy`).
"""

from __future__ import annotations

import ipaddress
import socket
import unicodedata
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from nemorl.base.text.secrets import redacted
from nemorl.errors import UsageError

from nemorl_trust.site import require

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
    host = ""
    try:
        host = urlsplit(url).hostname or ""
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or no URL at all
        return host == "localhost"


def plaintext_problem(url: str) -> tuple[str, str] | None:
    """Why nothing should be sent to a URL unencrypted, and what to do; ``None`` where it is not."""
    try:
        scheme = urlsplit(url).scheme.lower()
    except ValueError:  # no host that can be read
        scheme = url.partition(":")[0].lower()
    if scheme not in ENCRYPTED or names_loopback(url):
        return None
    what = f"{redacted(url)} is another machine, and {scheme} sends prompts, responses and keys unencrypted"
    return what, f"use {ENCRYPTED[scheme]} (`nemorl certs` makes certificates), or allow it: plaintext"


LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this machine that mean the same to those who call it."""


def origin(url: str) -> str:
    """Scheme, host and port of a URL, as they are compared: ``HTTPS://Node7./v1`` is ``https://node7:443``."""
    return origins(url)[0]


def origins(url: str) -> tuple[str, ...]:
    """:func:`origin` of a URL, then those with the other names of its host."""
    try:
        parts = urlsplit(url)
        given = parts.port
    except ValueError:  # no address at all, or no number
        return (url,)
    port = given or PORTS.get(parts.scheme.lower())
    hosts = (f"[{host}]" if ":" in host else host for host in _names_of_host(parts.hostname or ""))
    return tuple(f"{parts.scheme.lower()}://{host}" + (f":{port}" if port else "") for host in hosts)


def host_names(address: str) -> tuple[str, ...]:
    """The host of a URL, ``host:port`` or ``host`` as it is compared, then its other names.

    >>> host_names("node9.:6379"), host_names("https://denied。example/v1"), host_names("[::1]")[:2]
    (('node9',), ('denied.example',), ('::1', 'localhost'))
    """
    rest = address.rpartition("://")[2]
    try:
        host = urlsplit(f"//{rest}").hostname
    except ValueError:
        return (address,)
    return _names_of_host(host or "")


def _names_of_host(host: str) -> tuple[str, ...]:
    """A host as every resolver understands it: other dots and letters of other widths, addresses written as numbers."""
    try:
        name = host.encode("idna").decode()
    except UnicodeError:  # no name of the Internet
        name = unicodedata.normalize("NFKC", host)
    name = name.casefold().rstrip(".").partition("%")[0]
    try:
        ip = ipaddress.ip_address(name)
        name = str((isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped) or ip)
    except ValueError:
        with suppress(OSError, UnicodeError):
            name = socket.inet_ntoa(socket.inet_aton(name)) if name else name  # 0x7f.1, 2130706433
    is_here = name in LOOPBACK or (name.startswith("127.") and name.replace(".", "").isdigit())
    return tuple(dict.fromkeys((name, *LOOPBACK))) if is_here else (name,)


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
