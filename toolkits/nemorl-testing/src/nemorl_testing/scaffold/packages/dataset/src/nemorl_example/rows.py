"""Makes the rows."""

from __future__ import annotations

import random

from nemorl.types import Row


def products(largest: int, seed: int) -> list[Row]:
    """Every product of two numbers from 1 to ``largest``, in an order that the seed chooses."""
    numbers = range(1, largest + 1)
    rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a in numbers for b in numbers]
    random.Random(seed).shuffle(rows)
    return list(rows)
