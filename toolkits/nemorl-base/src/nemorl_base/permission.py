"""Asking the site's policy before something is done; what it refuses is in the audit log as well."""

from __future__ import annotations

from nemorl_base.audit.recording import record
from nemorl_base.errors import UsageError
from nemorl_base.site_policy import Refusal, refusal


def require(kind: str, name: str, *aliases: str) -> None:
    """Let the site's policy stop what comes next.

    Args:
        kind: ``plugins``, ``install``, ``clusters``, ``engines``, ``datasets``, ``models`` or ``unlock``.
        name: What is used, all links followed.
        aliases: How it may be called besides.

    Raises:
        UsageError: It is refused; says to whom, what, by which rule, and whom to ask.
    """
    found = asked(kind, name, *aliases)
    if found is not None:
        raise UsageError(found.message, fix=found.fix)


def asked(kind: str, name: str, *aliases: str) -> Refusal | None:
    """Why the site refuses something; ``None`` where it does not."""
    found = refusal(kind, name, *aliases)
    if found is not None:
        record("denied", {"kind": kind, "name": name, "rule": found.rule})
    return found
