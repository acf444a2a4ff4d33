"""Keys and values of conversations between their turns: of a next prompt only what is new is computed.

# L = layers, H = key-value heads, T = tokens, d = head size
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import NamedTuple

from torch import Tensor

Tokens = tuple[int, ...]


class Turn(NamedTuple):
    """A sequence that has been decoded."""

    tokens: Tokens
    keys: Tensor
    """[L, H, T, d]"""
    values: Tensor
    """[L, H, T, d]"""


class Turns:
    """Turns whose next one is to come, at most ``limit`` tokens of them; the oldest give way.

    Example:
        >>> import torch
        >>> turns, nothing = Turns(limit=5), torch.zeros(1, 1, 3, 2)
        >>> turns.put(Turn((5, 6, 7), nothing, nothing))
        >>> turns.before((5, 6, 7)) is None  # at least one token must be new
        True
        >>> turns.before((5, 6, 7, 8)).tokens
        (5, 6, 7)
        >>> turns.put(Turn((1, 2, 3), nothing, nothing))
        >>> turns.put(Turn((4, 2, 3), nothing, nothing))  # 6 tokens are too many
        >>> turns.before((1, 2, 3, 9)) is None
        True
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """Forget all, e.g. because the weights have changed."""
        self._turns: dict[Tokens, Turn] = {}
        """Oldest first"""
        self._sorted: list[Tokens] = []
        self._size = 0

    def put(self, turn: Turn) -> None:
        """Keep a turn. Of two with the same tokens the newer one stays."""
        if len(turn.tokens) > self._limit:
            return
        self._drop(turn.tokens)
        while self._size + len(turn.tokens) > self._limit:
            self._drop(next(iter(self._turns)))
        self._turns[turn.tokens] = turn
        self._size += len(turn.tokens)
        insort(self._sorted, turn.tokens)

    @property
    def nbytes(self) -> int:
        """Memory of keys and values."""
        return sum(turn.keys.nbytes + turn.values.nbytes for turn in self._turns.values())

    def before(self, prompt: Tokens) -> Turn | None:
        """The longest turn that ``prompt`` goes on from, if there is one. It stays."""
        wanted = prompt[:-1]
        while wanted:
            place = bisect_right(self._sorted, wanted) - 1
            if place < 0:
                return None
            nearest = self._sorted[place]
            # What begins ``prompt`` and sorts after the nearest would have been nearer.
            shared = _shared(nearest, wanted)
            if shared == len(nearest):
                return self._turns[nearest]
            wanted = wanted[:shared]
        return None

    def drop(self, turn: Turn) -> None:
        """Forget a turn that has gone on."""
        self._drop(turn.tokens)

    def _drop(self, tokens: Tokens) -> None:
        if self._turns.pop(tokens, None) is not None:
            self._size -= len(tokens)
            self._sorted.pop(bisect_right(self._sorted, tokens) - 1)


def _shared(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
