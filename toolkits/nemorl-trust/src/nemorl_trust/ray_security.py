"""Who may talk to a Ray cluster, as the variables that Ray reads. Beyond this machine: certificates and a token.

Each is what ``cluster.security`` says, else what the environment says, else what there is for this user: certificates
in :func:`certificates_folder`, the token in Ray's own file. Where there is none, somebody has to say that none will do.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Protocol

from nemorl.config.run import RunConfig
from nemorl.errors import ConfigIssue, UsageError
from nemorl.resources.ray_errors import MODE, TOKEN, TOKEN_PATH

from nemorl_trust.encryption import PLAINTEXT, names_loopback
from nemorl_trust.site import require

DEFAULT_PORT = 6379
AUTO = "auto"
AUTHORITY = "ca"
"""Name of the authority in a folder of certificates: ``ca.pem`` and ``ca.key``."""
USE_TLS, CERTIFICATE, KEY, TRUSTED = "RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"


class SecuritySettings(Protocol):
    """``cluster.security`` of a config."""

    @property
    def token_auth(self) -> bool | None: ...
    @property
    def token_file(self) -> Path | None: ...
    @property
    def tls_certificate(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_ca(self) -> Path | None: ...
    @property
    def plaintext(self) -> bool: ...


def ray_address(address: str) -> str:
    """``host:port`` of an existing cluster. No process list is asked, as Ray would: any user could answer.

    Args:
        address: ``auto``: what ``RAY_ADDRESS`` says, else the cluster that ``ray start`` began here; or ``host``, which
            gets Ray's default port; or ``host:port``.

    Raises:
        UsageError: ``auto``, and there is none; or another user says where.
    """
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS") or AUTO
    if address == AUTO:
        address = _noted_address()
    return address if ":" in address else f"{address}:{DEFAULT_PORT}"


def _noted_address() -> str:
    """The address that ``ray start`` writes on the machine of a head or worker."""
    path = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    fix = "give it: cluster.address=HOST:PORT"
    try:
        owner, text = path.stat().st_uid, path.read_text().strip()
    except OSError:
        raise UsageError(f"cluster.address is auto, and no Ray cluster is noted in {path}", fix=fix) from None
    if owner not in (0, os.getuid()):
        raise UsageError(f"cluster.address is auto, and {path} belongs to another user ({owner})", fix=fix)
    return text


def ray_variables(security: SecuritySettings, address: str | None) -> dict[str, str]:
    """The variables for connecting to a Ray cluster, or for starting one.

    Args:
        security: Of the config.
        address: As :func:`ray_address` gives it; ``None``: a private cluster on this machine's loopback.

    Raises:
        UsageError: The cluster is beyond this machine, and a certificate or a token is missing.
    """
    is_beyond = address is not None and not names_loopback(f"ray://{address.rpartition('://')[2]}")
    return {**_tls(security, address, is_beyond), **_token(security, address, is_beyond)}


def tls_variables(certificate: PurePath, key: PurePath, authority: PurePath) -> dict[str, str]:
    """The variables with which Ray encrypts, and checks who comes: absolute paths of PEM files."""
    return {USE_TLS: "1", CERTIFICATE: str(certificate), KEY: str(key), TRUSTED: str(authority)}


def certificates_folder() -> Path:
    """Where this user's certificates are, if nothing names others; it need not exist."""
    from platformdirs import user_config_path

    return user_config_path("nemorl") / "certs"


def own_certificate(folder: Path) -> dict[str, str]:
    """The variables for this machine's certificate in a folder; none where there is no such certificate.

    It is the one under the machine's name, or the only one whose key is there.
    """
    authority = folder / f"{AUTHORITY}.pem"
    found = [path for path in sorted(folder.glob("*.pem")) if path != authority and path.with_suffix(".key").is_file()]
    host = socket.gethostname()
    named = [path for path in found if path.stem in (host, host.partition(".")[0])]
    chosen = named or found
    if not authority.is_file() or len(chosen) != 1:
        return {}
    return tls_variables(chosen[0], chosen[0].with_suffix(".key"), authority)


def _tls(security: SecuritySettings, address: str | None, is_beyond: bool) -> dict[str, str]:
    if security.tls_certificate is not None and security.tls_key is not None and security.tls_ca is not None:
        return tls_variables(security.tls_certificate.resolve(), security.tls_key.resolve(), security.tls_ca.resolve())
    if not is_beyond or os.environ.get(USE_TLS) == "1":
        return {}
    if security.plaintext:
        require("unlock", PLAINTEXT)
        return {}
    folder = certificates_folder()
    if found := own_certificate(folder):
        return found
    raise UsageError(
        f"what goes to the Ray cluster at {address} would not be encrypted: there is no certificate of this machine in "
        f"{folder}, and cluster.security names none",
        fix=f"`nemorl certs make {folder} HOST,ADDRESS …` makes one for each node; or, where the network can be "
        "trusted and the cluster has none either, set cluster.security.plaintext: true",
    )


def _token(security: SecuritySettings, address: str | None, is_beyond: bool) -> dict[str, str]:
    if security.token_auth is False:
        return {MODE: "disabled"}
    if security.token_file is not None:
        return {MODE: "token", TOKEN_PATH: str(security.token_file.resolve())}
    is_named = bool(os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH))
    if address is None:
        return {MODE: "token"} if is_named else {MODE: "token", TOKEN: secrets.token_hex(32)}
    if security.token_auth:
        return {MODE: "token"}
    if not is_beyond or MODE in os.environ:
        return {}
    if is_named or (Path.home() / ".ray" / "auth_token").is_file():
        return {MODE: "token"}
    raise UsageError(
        f"the Ray cluster at {address} is beyond this machine, and there is no token to show it",
        fix="`ray get-auth-token --generate` makes one for all nodes, on which RAY_AUTH_MODE is then token; or, where "
        "the cluster demands none, set cluster.security.token_auth: false",
    )


SOON = 7
"""Days before its end from which on a certificate is worth a warning."""


def ray_problems(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """A problem where plain text, or who has no token, would reach another machine unless somebody said so.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told of a certificate that ends soon.
    """
    cluster = config.cluster
    if not cluster.uses_ray or cluster.address is None:
        return  # a private one listens on this machine's own address alone
    from nemorl_trust.authority import read

    try:
        found = ray_variables(cluster.security, ray_address(cluster.address))
        certificate = found.get(CERTIFICATE) or os.environ.get(CERTIFICATE)
        own = None if certificate is None else read(Path(certificate))[0]
    except UsageError as error:
        yield ConfigIssue("cluster.security", error.message, error.fix, here=True)
        return
    if own is not None and own.days_left < SOON:
        text = f"the certificate {certificate} ends on {own.expires:%Y-%m-%d}: `nemorl certs renew`, and Ray's restart"
        if own.days_left >= 0:
            warn(text)
        else:
            yield ConfigIssue("cluster.security", text, "renew it", here=True)
