"""Questions to the site: the kernel's (:class:`nemorl.base.packages.site.Site`), and whether something may be done. A
refusal is in the audit log as well."""

from __future__ import annotations

from typing import Any

from nemorl.errors import UsageError

from nemorl_trust import site_policy
from nemorl_trust.site_policy import Refusal, refusal


class PolicedSite:
    """Answers by the site's policy, the audit log and this user's certificates."""

    def has_policy(self) -> bool:
        return bool(site_policy.site_policies())

    def plugin_refusal(self, distribution: str) -> str | None:
        found = site_policy.refusal("plugins", distribution)
        return None if found is None else f"{found.message}; {found.fix}"

    def record(self, event: str, facts: dict[str, Any]) -> None:
        from nemorl_trust.audit.recording import record

        record(event, facts)

    def ray_address(self, address: str) -> str:
        from nemorl_trust.ray_security import ray_address

        return ray_address(address)

    def ray_variables(self, security: Any, address: str | None) -> dict[str, str]:
        from nemorl_trust.ray_security import ray_variables

        return ray_variables(security, address)


here = PolicedSite()
"""The site of this machine."""


def require(kind: str, name: str, *aliases: str, needs_leave: bool = True, replaces: bool = False) -> None:
    """Let the site's policy stop what comes next.

    Args:
        kind: One of :data:`nemorl_trust.site_policy.KINDS`.
        name: What is used, all links followed.
        aliases: How it may be called besides.
        needs_leave: As for :meth:`~nemorl_trust.site_policy.SitePolicy.refusal`.
        replaces: As there.

    Raises:
        UsageError: It is refused; says to whom, what, by which rule, and whom to ask.
    """
    found = asked(kind, name, *aliases, needs_leave=needs_leave, replaces=replaces)
    if found is not None:
        raise UsageError(found.message, fix=found.fix)


def asked(kind: str, name: str, *aliases: str, needs_leave: bool = True, replaces: bool = False) -> Refusal | None:
    """Why the site refuses something; ``None`` where it does not. As :func:`require`."""
    found = refusal(kind, name, *aliases, needs_leave=needs_leave, replaces=replaces)
    if found is not None:
        from nemorl_trust.audit.recording import record

        record("denied", {"kind": kind, "name": name, "rule": found.rule})
    return found
