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
from nemorl.plugins.registry import Registry, registry

if TYPE_CHECKING:
    from torch import Tensor

Export = Callable[[], Iterator[Mapping[str, "Tensor"]]]
"""A training backend's ``export_weights``."""

IN_PROCESS = "in_process"
"""Both sides live in one process: the payload is a function that yields the live parameters, and nothing is copied."""

_OWN = f"nemorl-core:{IN_PROCESS}"

Distance = Literal["process", "node", "cluster"]
"""What trainer and generator share: their process, their node, or only the network."""
_DISTANCES: tuple[Distance, ...] = ("process", "node", "cluster")


@dataclass(frozen=True)
class WeightHandle:
    """Permission to fetch one version of the policy's weights."""

    transport: str
    """Id of the plugin that carries them: it means the same in every process."""
    version: int
    payload: Any
    """Whatever the transport's ``publish`` returned; ``in_process``: the backend's ``export_weights``."""

    @property
    def is_in_process(self) -> bool:
        """The weights are the trainer's own, in this process."""
        return self.transport == _OWN

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """The weights, bucket by bucket, under their Hugging Face names.

        Tensors may be views of memory that the trainer owns: valid until the next but one version is published, and
        not to be written to.
        """
        buckets: Iterator[Mapping[str, Tensor]] = transport(self.transport).fetch(self.payload)
        return buckets


def transport(name: str) -> Any:
    """A transport by the id of its plugin, ready to publish and fetch.

    Raises:
        PluginNotFoundError: there is none of this name.
    """
    return registry().load("weight_transports", name)().build()


def in_process_handle(export: Export | None, version: int) -> WeightHandle:
    """The handle for a generator in the trainer's process; one that shares its weights needs no ``export``."""
    return WeightHandle(_OWN, version, export)


def choose_transport(
    offered: Sequence[str],
    accepted: Sequence[str],
    distance: Distance = "process",
    *,
    plugins: Registry,
    device: str = "cpu",
    colocated: bool = False,
) -> str | None:
    """The sender's first choice that the receiver accepts and that works between them, by its id; else ``None``.

    Args:
        offered: What the training backend offers, best first.
        accepted: What the generation backend accepts.
        distance: What they share.
        plugins: Those that may be used.
        device: torch device string of both.
        colocated: Whether they share devices.
    """
    for name in offered:
        if name not in accepted:
            continue
        try:
            config = plugins.load("weight_transports", name)
        except PluginNotFoundError:
            continue
        reaches = _DISTANCES.index(config.reach) >= _DISTANCES.index(distance)
        if reaches and device.partition(":")[0] in config.devices and (config.works_colocated or not colocated):
            return plugins.index.find("weight_transports", name).id
    return None
