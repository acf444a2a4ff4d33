"""The site that a machine belongs to: what it lets whom do and wants recorded, and how Ray is secured on it.

``nemorl-trust`` answers. Without it nothing is recorded, Ray is not started, and a machine that has a policy admits no
plugin: the policy was meant to forbid.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, Protocol

from nemorl.base.packages.distributions import guarded
from nemorl.base.text.reading import may_be_there
from nemorl.errors import UsageError

SITE_FILE = Path("/etc/nemorl/policy.yaml")
VARIABLE = "NEMORL_SITE_POLICY"
"""Names a policy file besides."""
TRUST, GROUP, NAME = "nemorl-trust", "nemorl.slots", "site"
"""The distribution that may answer, and its entry point. No policy is asked about it: it reads the policy."""
FIX = f"pip install {TRUST}"


class Site(Protocol):
    """Questions of the kernel to a site."""

    def has_policy(self) -> bool:
        """There are rules on this machine."""
        ...

    def plugin_refusal(self, distribution: str) -> str | None:
        """Why this user may not use a distribution's plugins; ``None`` where there is no reason."""
        ...

    def record(self, event: str, facts: dict[str, Any]) -> None:
        """Write an entry into the audit log.

        Raises:
            StorageError: It cannot be written, and the policy demands a log.
        """
        ...

    def ray_address(self, address: str) -> str:
        """``host:port`` of the Ray cluster that ``cluster.address`` names.

        Raises:
            UsageError: There is none, or another user says where.
        """
        ...

    def ray_variables(self, security: Any, address: str | None) -> dict[str, str]:
        """Environment variables with which Ray encrypts, and checks who comes.

        Args:
            security: ``cluster.security`` of a config.
            address: Of an existing cluster; ``None``: a private one.

        Raises:
            UsageError: The cluster is beyond this machine, and a certificate or a token is missing.
        """
        ...


class WithoutTrust:
    """Stands in where ``nemorl-trust`` is not installed."""

    def has_policy(self) -> bool:
        return bool(os.environ.get(VARIABLE)) or may_be_there(SITE_FILE)

    def plugin_refusal(self, distribution: str) -> str | None:
        return f"this machine has a policy, and {TRUST}, which reads it, is not installed; {FIX}"

    def record(self, event: str, facts: dict[str, Any]) -> None:
        pass

    def ray_address(self, address: str) -> str:
        self._refuse()

    def ray_variables(self, security: Any, address: str | None) -> dict[str, str]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(f"Ray's processes are secured by {TRUST}, which is not installed", fix=FIX)


@cache
def site() -> Site:
    """The site of this machine."""
    try:
        points = guarded(metadata.distribution(TRUST)).entry_points.select(group=GROUP, name=NAME)
        found: Site = next(iter(points)).load()
    except (ImportError, StopIteration):  # it is not there, or only a part of it
        return WithoutTrust()
    return found
