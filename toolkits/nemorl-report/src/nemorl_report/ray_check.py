"""Before a run joins a Ray cluster: what goes there unencrypted is said, or refused where the site wants that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from nemorl.config.run import RunConfig
from nemorl.errors import ConfigIssue
from nemorl_base.encryption import PLAINTEXT, names_loopback
from nemorl_base.permission import asked


def ray_problems(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """A problem where plain text would reach another machine and the site does not unlock that.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told where it may.
    """
    cluster = config.cluster
    address = os.environ.get("RAY_ADDRESS") if cluster.address == "auto" else cluster.address
    if not cluster.uses_ray or address is None or names_loopback(f"ray://{address.rpartition('://')[2]}"):
        return  # a private one listens on this machine's own address alone
    if cluster.security.tls_certificate is not None or os.environ.get("RAY_USE_TLS") == "1":
        return
    fix = "give cluster.security a certificate of each node (`nemorl certs make`), with which Ray encrypts"
    found = asked("unlock", PLAINTEXT)
    if found is not None:
        yield ConfigIssue("cluster.security", found.message, f"{fix}, or {found.fix}")
    else:
        warn(f"what goes to the Ray cluster at {address} is not encrypted: {fix}")
