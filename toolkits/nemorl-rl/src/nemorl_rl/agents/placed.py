"""PlacedSample: a sample that says where the answers of the policy stand in it, and who asked for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nemorl.types import Sample


class TurnPlace(NamedTuple):
    """Where an answer of the policy stands.

    Example:
        >>> TurnPlace(sequence=0, start=4, stop=7).stop
        7
    """

    sequence: int
    """Which of the episode's token sequences it stands in."""
    start: int
    """Its first token there."""
    stop: int
    """One beyond its last."""
    is_cut: bool = False
    """The token limit ended it."""


@dataclass(frozen=True, slots=True)
class PlacedSample(Sample):
    """A sample of which each answer and each seat is known. In its ``sequences`` these are still the whole episode's.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> game = PlacedSample(Prompt(0, "", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(0.0), "", "stop",
        ...                     turn_places=(TurnPlace(0, 1, 2),), seats=("white",))
        >>> game.seats
        ('white',)
    """

    turn_places: tuple[TurnPlace, ...] = ()
    """The answers that are trained, in the order in which they were asked for."""
    seats: tuple[str, ...] = ()
    """The seat of each token sequence; those of one seat are neighbours. Empty: the episode has no seats."""
