"""Two searches: for the differences that matter, by delta debugging, and for the checkpoint at which something changed.

Both ask a question of their caller and know nothing of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

Outcome = Literal["falls", "holds", "unresolved"]
"""Of a probe: the metric is as in the bad run, as in the good one, or there is none."""
Test = Callable[[Sequence[int]], Outcome]


def minimal(differences: Sequence[int], test: Test) -> list[int]:
    """The fewest of some differences with which the metric falls: without any one of them it does not.

    The algorithm ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
    Transactions on Software Engineering 28(2), 2002. At most 2 log2(n) probes where one difference alone is the cause.

    Args:
        differences: With all of them, the metric falls; with none, it does not.
        test: Tries some of them. What it is asked twice it should remember.

    >>> minimal(range(8), lambda some: "falls" if {1, 6} <= set(some) else "holds")
    [1, 6]
    """
    found, parts = list(differences), 2
    while len(found) >= 2:
        chunks = _split(found, parts)
        smaller = next((chunk for chunk in chunks if test(chunk) == "falls"), None)
        if smaller is not None:
            found, parts = smaller, 2
            continue
        rests = [[one for one in found if one not in chunk] for chunk in chunks] if parts > 2 else []
        smaller = next((rest for rest in rests if test(rest) == "falls"), None)
        if smaller is not None:
            found, parts = smaller, max(parts - 1, 2)
        elif parts < len(found):
            parts = min(len(found), 2 * parts)
        else:
            break
    return found


def _split(items: Sequence[int], parts: int) -> list[list[int]]:
    """Parts of nearly equal size, none empty."""
    bounds = [place * len(items) // parts for place in range(parts + 1)]
    return [list(items[start:stop]) for start, stop in pairwise(bounds) if stop > start]


def first_bad(steps: Sequence[int], test: Callable[[int], Outcome]) -> tuple[int, int]:
    """The neighbouring steps between which the metric falls.

    Args:
        steps: Ascending. At the first it holds, at the last it has fallen.
        test: Tries one of those between them; one that is unresolved is passed over for its neighbours.

    Returns:
        The last at which it holds, and the first at which it has fallen: neighbours, but for unresolved ones between.

    >>> first_bad([10, 20, 30, 40, 50], lambda step: "falls" if step >= 40 else "holds")
    (30, 40)
    """
    good, bad = 0, len(steps) - 1
    unresolved: set[int] = set()
    while candidates := [place for place in range(good + 1, bad) if place not in unresolved]:
        middle = (good + bad) / 2
        place = min(candidates, key=lambda one: abs(one - middle))
        outcome = test(steps[place])
        if outcome == "unresolved":
            unresolved.add(place)
        elif outcome == "falls":
            bad = place
        else:
            good = place
    return steps[good], steps[bad]
