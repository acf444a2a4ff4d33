"""Before a run joins a Ray cluster beyond this machine: it has a certificate that holds, and a token."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from nemorl.config.run import RunConfig
from nemorl.errors import ConfigIssue, UsageError

from nemorl_trust.ray_security import CERTIFICATE, ray_address, ray_variables

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
    try:
        found = ray_variables(cluster.security, ray_address(cluster.address))
    except UsageError as error:
        yield ConfigIssue("cluster.security", error.message, error.fix, here=True)
        return
    certificate = found.get(CERTIFICATE) or os.environ.get(CERTIFICATE)
    if certificate is None:
        return
    from nemorl_trust.authority import read

    (own,) = read(Path(certificate))
    if own.days_left < SOON:
        text = f"the certificate {certificate} ends on {own.expires:%Y-%m-%d}: `nemorl certs renew`, and Ray's restart"
        if own.days_left >= 0:
            warn(text)
        else:
            yield ConfigIssue("cluster.security", text, "renew it", here=True)
