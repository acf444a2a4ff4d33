"""Amounts of memory with their reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Part:
    """Memory of one rank, for one purpose."""

    name: str
    size: float
    """Bytes"""
    formula: str
    """Where they come from, with the numbers"""

    @property
    def gib(self) -> float:
        return self.size / GIB


@dataclass(frozen=True)
class Moments:
    """Memory of one model on one rank: what is always there, and what is there besides at each moment of a step."""

    lasting: tuple[Part, ...]
    passing: dict[str, tuple[Part, ...]]
    """Moment -> parts; they never meet"""

    @property
    def worst(self) -> str:
        """The moment that takes most."""
        return max(self.passing, key=lambda moment: total(self.passing[moment]), default="")

    @property
    def peak(self) -> tuple[Part, ...]:
        """All parts at the worst moment."""
        return self.lasting + self.passing.get(self.worst, ())


def total(parts: Iterable[Part]) -> float:
    """Bytes of all of them."""
    return sum(part.size for part in parts)


def count(number: float) -> str:
    """``8.03e9`` as ``8.03 G``, for formulas."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:.4g}"
