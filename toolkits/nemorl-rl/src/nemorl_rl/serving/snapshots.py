"""Engines that hold several versions of the weights, and requests that name one.

The config of such an engine has an option ``snapshots``: how many versions it holds at most, the newest ones. A request
whose ``version`` is set is sampled from that version alone, whatever comes meanwhile. When its version is dropped
before it has ended it fails, as one does that names a version that is not held. The capability ``snapshots`` promises
that of any weights, ``adapter_snapshots`` of adapters that travel apart from the model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from nemorl.contracts import HoldsVersions
from nemorl.errors import BackendError

if TYPE_CHECKING:
    from nemorl.plugins.kinds import GenerationBackendConfig
    from nemorl.weights import Form

SNAPSHOTS, ADAPTER_SNAPSHOTS = "snapshots", "adapter_snapshots"
"""The capabilities."""


class VersionNotHeldError(BackendError):
    """A request for weights that the engine does not have: they were dropped, or never came."""


def version_error(version: int, held: Collection[int]) -> VersionNotHeldError:
    """The error of a request for ``version``, given the versions that there are."""
    return VersionNotHeldError(
        f"the engine does not hold version {version} of the weights, but {', '.join(map(str, sorted(held)))}",
        fix="name one of these, name none to have the newest, or raise generation.backend.snapshots",
    )


def held_versions(backend: GenerationBackendConfig) -> int:
    """Versions of the whole weights that an engine of this backend holds at most.

    >>> held_versions(GenerationConfig(backend={"name": "hf", "snapshots": 3}).backend)
    3
    """
    return cast(HoldsVersions, backend).snapshots if SNAPSHOTS in backend.supports else 1


def takes_versions(backend: GenerationBackendConfig, form: Form) -> bool:
    """Whether requests to an engine of this backend may name versions, given what an update carries.

    >>> takes_versions(GenerationConfig(backend={"name": "hf", "snapshots": 3}).backend, "model")
    True
    """
    return SNAPSHOTS in backend.supports or (form == "adapters" and holds_adapters(backend))


def holds_adapters(backend: GenerationBackendConfig) -> bool:
    """Whether an engine of this backend is to hold several versions, and can of adapters alone."""
    return ADAPTER_SNAPSHOTS in backend.supports and cast(HoldsVersions, backend).snapshots > 1
