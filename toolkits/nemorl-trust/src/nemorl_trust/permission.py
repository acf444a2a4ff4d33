"""Asking the site's policy before something is done; what it refuses is in the audit log as well."""

from __future__ import annotations

from nemorl.errors import UsageError

from nemorl_trust.audit.recording import record
from nemorl_trust.site_policy import Refusal, refusal


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
        record("denied", {"kind": kind, "name": name, "rule": found.rule})
    return found
