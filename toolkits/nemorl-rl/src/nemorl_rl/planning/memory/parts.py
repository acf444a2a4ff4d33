"""Amounts of memory with their reasons, and parts that rest in the host's memory while nothing needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from nemorl.contracts.memory import MemoryPart

GIB = 2**30
UPDATE = "update"
"""The moment of a training step that needs the optimizer's state."""


@dataclass(frozen=True)
class Part:
    """Memory of one rank, for one purpose.

    >>> Part("weights", 4 * 2**30, "4 B x 1.07 G", "weights").gib
    4.0
    """

    name: str
    size: float
    """Bytes"""
    formula: str
    """Where they come from, with the numbers"""
    held: MemoryPart | None = None
    """Its part in ``held_bytes`` of its backend; ``None``: it is there only while the backend works"""
    stays: bool = False
    """It cannot leave the device while its owner sleeps"""

    @property
    def gib(self) -> float:
        return self.size / GIB


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Moved:
    """What a model has in the host's memory, in bytes of one rank, and what crosses the bus because of it, counted once
    for each direction."""

    on_host: float = 0.0
    per_update: float = 0.0
    per_microbatch: float = 0.0
    """Forward and backward, as far as nothing is computed meanwhile"""
    per_scoring: float = 0.0
    """Of the reference"""


@dataclass(frozen=True)
class Moments:
    """Memory of one model on one rank: what is always there, and what is there besides at each moment of its work.

    >>> Moments((Part("weights", 4, "4 B"),), {"backward": (Part("activations", 3, "3 B"),)}, ()).worst
    'backward'
    """

    lasting: Parts
    training: Mapping[str, Parts]
    """Moment of a training step -> parts; they never meet. Empty for a model that does not learn"""
    scoring: Parts
    """A forward pass without gradient: log-probs or values"""
    moved: Moved = Moved()

    @property
    def worst(self) -> str:
        """The moment that takes most."""
        return max(self.passing, key=lambda moment: total(self.passing[moment]))

    @property
    def passing(self) -> Mapping[str, Parts]:
        """Moment -> parts, of training and scoring."""
        return {**self.training, "scoring": self.scoring}

    @property
    def peak(self) -> Parts:
        """All parts at the worst moment."""
        return self.lasting + self.passing[self.worst]


def total(parts: Iterable[Part]) -> float:
    """Bytes of all of them."""
    return sum(part.size for part in parts)


def count(number: float) -> str:
    """``8.03e9`` as ``8.03 G``, for formulas."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:.4g}"


def rested(moments: Moments, resting: Collection[MemoryPart]) -> Moments:
    """The same model whose ``resting`` parts come in for their work: the optimizer's state for updates, the reference
    for scoring.

    Args:
        moments: Of a model on a device that is not the host's processor.
        resting: Of ``optimizer`` and ``reference``.
    """
    if not resting:
        return moments
    leaving = tuple(part for part in moments.lasting if part.held in resting)
    state, reference = (
        tuple(replace(part, held=None) for part in leaving if part.held == name) for name in ("optimizer", "reference")
    )
    training = dict(moments.training)
    if state:
        training[UPDATE] = (*training.get(UPDATE, ()), *state)
    moved = replace(
        moments.moved,
        per_update=moments.moved.per_update + 2 * total(state),
        per_scoring=moments.moved.per_scoring + 2 * total(reference),
        on_host=moments.moved.on_host + total(leaving),
    )
    lasting = tuple(part for part in moments.lasting if part not in leaving)
    return replace(moments, lasting=lasting, training=training, scoring=(*moments.scoring, *reference), moved=moved)
