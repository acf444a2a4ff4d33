"""What the kernel asks of the site (:class:`nemorl.base.packages.site.Site`)."""

from __future__ import annotations

from typing import Any

from nemorl_trust import site_policy


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
