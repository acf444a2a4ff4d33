"""Engines that hold several versions of the weights (capability ``snapshots``), and requests that name one.

The config of such an engine has an option ``snapshots``: how many versions it holds at most, the newest ones. A request
whose ``version`` is set is sampled from that version alone, whatever comes meanwhile. When its version is dropped
before it has ended it fails, as one does that names a version that is not held.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol, cast

from nemorl.errors import BackendError

if TYPE_CHECKING:
    from nemorl.plugins.kinds import GenerationBackendConfig

SNAPSHOTS = "snapshots"
"""The capability."""


class HoldsVersions(Protocol):
    """Options of a generation backend with the capability ``snapshots``."""

    @property
    def snapshots(self) -> int:
        """Most versions of the weights that an engine holds."""
        ...


class VersionNotHeldError(BackendError):
    """A request for weights that the engine does not have: they were dropped, or never came."""


def version_error(version: int, held: Collection[int]) -> VersionNotHeldError:
    """The error of a request for ``version``, given the versions that there are."""
    return VersionNotHeldError(
        f"the engine does not hold version {version} of the weights, but {', '.join(map(str, sorted(held)))}",
        fix="name one of these, name none to have the newest, or raise generation.backend.snapshots",
    )


def held_versions(backend: GenerationBackendConfig) -> int:
    """Versions of the weights that an engine of this backend holds at most.

    >>> held_versions(GenerationConfig(backend={"name": "hf", "snapshots": 3}).backend)
    3
    """
    return cast(HoldsVersions, backend).snapshots if SNAPSHOTS in backend.supports else 1
