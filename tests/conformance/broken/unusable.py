"""Datasets that no check can get far with."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from nemorl.plugins.kinds import DatasetConfig


class NoRows(DatasetConfig):
    """Gives a number where rows are asked for."""

    summary: ClassVar[str] = "no rows at all"

    def build(self, split: str) -> Any:
        return 30


class Exits(DatasetConfig):
    """Ends the process when it finds nothing to read."""

    summary: ClassVar[str] = "gives up early"

    def build(self, split: str) -> Any:
        sys.exit(3)
