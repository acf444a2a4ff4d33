"""The worth of k of n responses to one prompt: ``pass@k`` (any is right) and ``cons@k`` (the majority is right).

Both are unbiased: the mean over all subsets of size k of the n responses, by counting and not by drawing subsets.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of k responses drawn from n (of which ``correct`` are right) is right.

    Unbiased: 1 - C(n - correct, k) / C(n, k), arXiv:2107.03374, eq. 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def cons_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> list[float]:
    """Probability that the most frequent answer of k responses drawn from these n is right, for k = 1 … n.

    A response without an answer does not vote, and no votes at all are wrong. Of answers that are equally frequent,
    each wins with the same probability. An answer is right if most of the responses that gave it are (arXiv:2203.11171,
    where k = n and the answers are final).

    Counting: for every winning number of votes t, the subsets in which no answer has more than t votes, by how many
    answers have exactly t. Answers given fewer than t times cannot win, so they count as one heap. At most about
    n^3 log n additions.

    Args:
        answers: [n] what each response answers, equal texts for equal answers.
        correct: [n] whether it is right.

    Returns:
        [n] values in 0 … 1; index 0 is k = 1.
    """
    n = len(answers)
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, is_right in zip(answers, correct, strict=True) if is_right)
    classes = [(count, 2 * right[answer] > count) for answer, count in votes.items()]
    # wins[s][k]: subsets of size k with s answers in front, once for each of these s that is right.
    wins: dict[int, list[int]] = defaultdict(lambda: [0] * (n + 1))
    for t in range(1, max(votes.values(), default=0) + 1):
        for tied, by_size in _subsets_led_with(t, classes, n).items():
            for k, count in enumerate(by_size):
                wins[tied][k] += count
    return [float(sum(Fraction(wins[s][k], s) for s in wins) / math.comb(n, k)) for k in range(1, n + 1)]


def _subsets_led_with(t: int, classes: Sequence[tuple[int, bool]], n: int) -> dict[int, list[int]]:
    """Subsets whose most frequent answers have t votes: answers in front -> [n + 1] right ones among them, by size."""
    able = [(count, is_right) for count, is_right in classes if count >= t]
    heap = n - sum(count for count, _ in able)
    # ways[s][k]: subsets so far with s answers at t votes and k responses; hits: each times the right ones among the s.
    ways = {0: [math.comb(heap, k) for k in range(n + 1)]}
    hits = {0: [0] * (n + 1)}
    size = heap
    for count, is_right in able:
        fewer = [math.comb(count, j) for j in range(t)]
        exactly = math.comb(count, t)
        new_ways = {s: [0] * (n + 1) for s in range(len(ways) + 1)}
        new_hits = {s: [0] * (n + 1) for s in range(len(ways) + 1)}
        for s in ways:
            for k in range(size + 1):
                way, hit = ways[s][k], hits[s][k]
                if way == 0:
                    continue
                for j, choices in enumerate(fewer):
                    new_ways[s][k + j] += way * choices
                    new_hits[s][k + j] += hit * choices
                new_ways[s + 1][k + t] += way * exactly
                new_hits[s + 1][k + t] += (hit + way * is_right) * exactly
        ways, hits, size = new_ways, new_hits, size + count
    return {s: by_size for s, by_size in hits.items() if s > 0}
