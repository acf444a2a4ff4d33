"""Where this process's audit log is, and one line to write into it.

One file per user, so that the system's own permissions keep users out of each other's: ``FOLDER/USER.jsonl``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemorl.base.text.reading import expanded
from nemorl.errors import StorageError

from nemorl_trust.audit.log import AuditLog, user_name
from nemorl_trust.site_policy import site_policies

VARIABLE = "NEMORL_AUDIT"
"""Folder of the logs, or ``off``."""


def demanded_folder() -> Path | None:
    """Where the site's policy wants audit logs; ``None``: it does not say."""
    return next((policy.audit for policy in site_policies() if policy.audit is not None), None)


def audit_folder() -> Path | None:
    """Where audit logs are: as the site's policy says, or ``NEMORL_AUDIT``, else in the user's folder for such records;
    ``None``: nowhere."""
    from platformdirs import user_state_path

    demanded = demanded_folder()
    if demanded is not None:
        return demanded
    wanted = os.environ.get(VARIABLE)
    if wanted == "off":
        return None
    return expanded(wanted) if wanted else user_state_path("nemorl") / "audit"


def audit_log() -> AuditLog | None:
    """The log that this process writes; ``None`` where there is to be none."""
    folder = audit_folder()
    return None if folder is None else AuditLog(folder / f"{user_name()}.jsonl")


def _on_stderr(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def record(event: str, facts: dict[str, Any], warn: Callable[[str], None] = _on_stderr) -> None:
    """Write one entry.

    Args:
        event: What happened, e.g. ``run_started``.
        facts: Plain data about it. No texts of models and no secrets.
        warn: Told where it cannot be written: what happens goes on. Unset: standard error says so.

    Raises:
        StorageError: It cannot be written, and the site's policy demands a log.
    """
    log = audit_log()
    try:
        if log is not None:
            log.append(event, facts)
    except StorageError as error:
        if demanded_folder() is not None:
            raise
        warn(f"no entry in the audit log: {error.message}. {error.fix}")
