"""How new weights get from the trainer to the generator.

A transport is chosen once: the first one that the training backend offers, the generation backend accepts and that
reaches from where one lives to where the other does. The handle is what crosses; its payload belongs to the
transport. Transports are plugins (``nemorl.weight_transports``); the kernel's own is ``nemorl.resources.in_process``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nemorl.errors import PluginNotFoundError
from nemorl.plugins.registry import registry

if TYPE_CHECKING:
    from torch import Tensor

Export = Callable[[], Iterator[Mapping[str, "Tensor"]]]
"""A training backend's ``export_weights``."""

IN_PROCESS = "in_process"
"""Both sides live in one process: the payload is a function that yields the live parameters, and nothing is copied."""

Distance = Literal["process", "node", "cluster"]
"""What trainer and generator share: their process, their node, or only the network."""
_DISTANCES: tuple[Distance, ...] = ("process", "node", "cluster")


@dataclass(frozen=True)
class WeightHandle:
    """Permission to fetch one version of the policy's weights."""

    transport: str
    version: int
    payload: Any
    """Whatever the transport's ``publish`` returned; ``in_process``: the backend's ``export_weights``."""

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """The weights, bucket by bucket, under their Hugging Face names.

        Tensors may be views of memory that the trainer owns: valid until the next but one version is published, and
        not to be written to.
        """
        buckets: Iterator[Mapping[str, Tensor]] = transport(self.transport).fetch(self.payload)
        return buckets


def transport(name: str) -> Any:
    """A transport by name, ready to publish and fetch.

    Raises:
        PluginNotFoundError: there is none of this name.
    """
    return registry().load("weight_transports", name)().build()


def in_process_handle(export: Export, version: int) -> WeightHandle:
    """The handle for a generator in the same process as the trainer."""
    return WeightHandle(IN_PROCESS, version, export)


def choose_transport(
    offered: Sequence[str],
    accepted: Sequence[str],
    distance: Distance = "process",
    *,
    device: str = "cpu",
    colocated: bool = False,
) -> str | None:
    """The sender's first choice that the receiver accepts and that works between them; ``None`` if there is none.

    Args:
        offered: What the training backend offers, best first.
        accepted: What the generation backend accepts.
        distance: What they share.
        device: torch device string of both.
        colocated: Whether they share devices.
    """
    return next((name for name in offered if name in accepted and _works(name, distance, device, colocated)), None)


def _works(name: str, distance: Distance, device: str, colocated: bool) -> bool:
    try:
        config = registry().load("weight_transports", name)
    except PluginNotFoundError:
        return False
    reach: Distance = config.reach
    return (
        _DISTANCES.index(reach) >= _DISTANCES.index(distance)
        and device.partition(":")[0] in config.devices
        and (config.works_colocated or not colocated)
    )
