"""Demands of one attempt's Ray on who connects: a token, and a certificate of the attempt's own authority.

The first node makes both in the folder of the attempt, where this user alone can read them; each node gives itself a
certificate for its address. Nodes whose environment says ``RAY_USE_TLS`` have what their site gave them.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from nemorl.resources.ray_errors import MODE, TOKEN_PATH
from nemorl_trust.ray_security import USE_TLS, tls_variables

TOKEN, CERTIFICATES = "ray-token", "ray-certificates"
DAYS = 825
"""Until certificates end: longer than any job."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_gcs_server_request_timeout_seconds": "120",
}
FOREIGN = ("PMI_", "PMIX_", "OMPI_", "MPI_", "SLURM_", "SLURMD_")
"""Variables of a launcher of MPI, which libraries would take for their own."""


def child_environment(access: dict[str, str]) -> dict[str, str]:
    """The environment of Ray's processes and of the run: without Slurm's, with what opens the cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**SETTINGS, **kept, **access}


def make_access(folder: Path, *, plaintext: bool) -> None:
    """Make a new token, and an authority, that this user alone can read.

    Args:
        folder: Of the attempt.
        plaintext: Without an authority.
    """
    descriptor = os.open(folder / TOKEN, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    if makes_certificates(plaintext):
        from nemorl_trust.authority import make

        make(folder / CERTIFICATES, [], days=DAYS)


def makes_certificates(plaintext: bool) -> bool:
    """Ray is encrypted, and this node has no certificate of its site."""
    return not plaintext and USE_TLS not in os.environ


def authority_key(folder: Path) -> Path:
    """The file with which nodes sign their certificates, once the first node has made it."""
    return folder / CERTIFICATES / "ca.key"


def own_access(folder: Path, name: str, address: str, *, plaintext: bool) -> dict[str, str]:
    """The variables by which this node's Ray demands the token and a certificate, and its clients show them.

    Args:
        folder: Of the attempt, with what :func:`make_access` made.
        name: Of this node's certificate.
        address: IP address of this node.
        plaintext: Without certificates.
    """
    found = {MODE: "token", TOKEN_PATH: str(folder / TOKEN)}
    if not makes_certificates(plaintext):
        return found
    from nemorl_trust.authority import make

    certificates = folder / CERTIFICATES
    own = certificates / f"{name}.pem"
    if not own.exists():
        make(certificates, [f"{name},{address}"], days=DAYS)
    return {**found, **tls_variables(own, own.with_suffix(".key"), certificates / "ca.pem")}
