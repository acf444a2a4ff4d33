"""Slots that a run needs filled (:mod:`nemorl.plugins.slots`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nemorl.plugins.slots import Slot

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig
    from nemorl.contracts import DataModule, DataSource, HeldOut
    from nemorl.contracts.display import Display


class OpenData(Protocol):
    """Makes batches of whatever users call data."""

    def __call__(
        self,
        source: DataSource,
        held_out: DataSource | None,
        config: RunConfig,
        batch_size: int,
        *,
        accept_changed_data: bool = False,
    ) -> tuple[DataModule, HeldOut | None]:
        """The batches of a run, and the rows to validate on."""
        ...


OPEN_DATA: Slot[OpenData] = Slot("open_data")
WEIGHTS_FINGERPRINT: Slot[Callable[[str], str | None]] = Slot("weights_fingerprint")
"""Text that differs where the weights of two models do, given a model's name or path."""
CONSOLE: Slot[Callable[[], Display]] = Slot("console")
"""Shows a run on the terminal."""
