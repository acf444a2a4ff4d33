"""The contract of backends whose learning rate can be changed while they train: the capability ``rate_scale``."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class RateScalingBackend(Protocol):
    """A training backend whose learning rate can be scaled while it trains (capability ``rate_scale``).

    The scale is a part of its checkpoints. An alert with the action ``lower_rate`` uses it.

    >>> backend.scale_rate(0.5)  # doctest: +SKIP
    """

    def scale_rate(self, factor: float) -> None:
        """Multiply the learning rate of all later steps, over what the schedule says and over earlier factors."""
        ...
