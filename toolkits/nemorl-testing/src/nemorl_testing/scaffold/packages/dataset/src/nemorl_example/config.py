"""The options. Nothing heavy is imported here: listing and checking configs must work without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import DatasetConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.types import Row


class ExampleConfig(DatasetConfig):
    """Products of two numbers: ``3*7=`` -> ``21``."""

    summary: ClassVar[str] = "products of two small numbers, no download"

    largest: int = Field(12, ge=2, le=1000)
    """Factors go from 1 to this."""
    num_validation: int = Field(20, ge=0)
    """Products held out of training. 0: no validation split."""
    seed: int = Field(0, ge=0)
    """Chooses the order and which products are held out."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.num_validation >= self.largest**2:
            yield ConfigIssue(
                "num_validation",
                f"{self.num_validation} of {self.largest**2} products held out leave none to train on",
                "lower it, or raise largest",
            )

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_example.rows import products

        rows = products(self.largest, self.seed)
        held_out = {"validation": rows[: self.num_validation], "train": rows[self.num_validation :]}
        return held_out.get(split) or None
