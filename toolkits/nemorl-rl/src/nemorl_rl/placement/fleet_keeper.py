"""FleetKeeper: the thread that tends the engines of a run and does what ``nemorl engines`` asks for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemorl.errors import NemorlError, boundary

from nemorl_rl.placement.fleet import EngineFleet
from nemorl_rl.placement.fleet_orders import Orders

ROUND_S = 0.5
"""How often lost engines and orders are looked at."""
ADD_WAIT_S = 5.0
"""Longest wait for the devices of one more engine. Who asks is told, and may ask again."""

_log = logging.getLogger(__name__)


class FleetKeeper:
    """Keeps a fleet from its start to its end."""

    def __init__(self, fleet: EngineFleet, folder: Path, facts: Callable[[], Mapping[str, Any]]) -> None:
        """
        Args:
            fleet: It has its first engines.
            folder: Of the files that are shared with ``nemorl engines``.
            facts: What else to report: the backend, and the version of the weights.
        """
        self._fleet, self._orders, self._facts = fleet, Orders(folder), facts
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nemorl-fleet-keeper", daemon=True)
        self._report()
        self._thread.start()
        fleet.on_shutdown = self.close

    def close(self) -> None:
        """Stop, and say so. Calling it twice is harmless."""
        self._over.set()
        self._thread.join()
        self._orders.report({**self._facts(), "is_over": True, "engines": []})

    def _run(self) -> None:
        said = ""
        while not self._over.wait(ROUND_S):
            try:
                with boundary("tending the engines"):
                    self._round()
                said = ""
            except NemorlError as error:  # a full disk, say: the engines go on
                if error.message != said:
                    said = error.message
                    _log.warning("%s", error)

    def _round(self) -> None:
        self._fleet.tend()
        self._orders.serve(lambda size: self._fleet.add(size, ADD_WAIT_S), self._fleet.drop)
        self._report()

    def _report(self) -> None:
        self._orders.report({**self._facts(), "is_over": False, "engines": self._fleet.as_json()})
