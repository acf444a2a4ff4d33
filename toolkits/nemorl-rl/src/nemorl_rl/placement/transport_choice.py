"""Which way weights take from training to generation: the best that both backends and the distance allow."""

from __future__ import annotations

from collections.abc import Sequence

from nemorl.errors import PluginNotFoundError
from nemorl.plugins.registry import Registry
from nemorl.weights import Distance

_DISTANCES: tuple[Distance, ...] = ("process", "node", "cluster")


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
