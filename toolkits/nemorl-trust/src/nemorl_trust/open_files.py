"""How many files and connections this process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

ENOUGH = 65_536
"""Some programs that are started from here close every number up to the limit, which may be a billion."""


def allow_more_open_files() -> None:
    """Raise the soft limit, often 1024, as far as the hard one lets it. Where the system says no, it stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
