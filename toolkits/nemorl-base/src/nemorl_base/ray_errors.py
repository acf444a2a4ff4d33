"""Errors of Ray itself, which knows nothing of runs, in words for whoever has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nemorl_base.errors import ResourceError


@contextmanager
def lost_cluster_named() -> Iterator[None]:
    """Turn Ray's own errors inside the block into one that says how to go on.

    Raises:
        ResourceError: The cluster was lost, or is another one by now: its GCS died, and came back empty.
    """
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ResourceError(
            f"the Ray cluster was lost: {type(error).__name__}: {first_line}",
            fix="start the cluster again if it is not back; the same command then continues from the last checkpoint",
        ) from error
