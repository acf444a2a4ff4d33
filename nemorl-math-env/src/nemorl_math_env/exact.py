"""Exact values of formulas whose every step is rational."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from nemorl_math_env.expressions import Tree

MAX_BITS = 20_000
"""Exact powers up to this size."""
MAX_COUNT = 1000
"""Exact factorials and binomials up to this number."""


class UndefinedError(ArithmeticError):
    """A formula has no finite value there."""


def exact_value(tree: Tree, point: Mapping[str, Fraction] | None = None) -> Fraction | None:
    """The value of a formula in which no step leaves the rational numbers, else ``None``.

    Raises:
        ArithmeticError: It divides by zero.
    """
    if tree[0] == "number":
        return Fraction(tree[1])
    if tree[0] == "symbol":
        return None if point is None else point[tree[1]]
    if tree[0] == "constant":
        return None
    values = [exact_value(part, point) for part in tree[1:]]
    rational = [value for value in values if value is not None]
    return exact_step(tree[0], rational) if len(rational) == len(values) else None


def exact_step(kind: str, values: Sequence[Fraction]) -> Fraction | None:
    """The rational result of one operation; ``None`` where it is not rational or would be huge."""
    a, b = values[0], values[1] if len(values) > 1 else Fraction(0)
    if kind in _RATIONAL:
        return Fraction(_RATIONAL[kind](a, b))
    if kind == "power":
        return _integer_power(a, b)
    is_small = a.denominator == b.denominator == 1 and 0 <= b <= MAX_COUNT and 0 <= a <= MAX_COUNT
    if kind == "factorial" and is_small:
        return Fraction(math.factorial(int(a)))
    if kind == "binomial" and is_small:
        return Fraction(math.comb(int(a), int(b)))
    return None


def _integer_power(a: Fraction, b: Fraction) -> Fraction | None:
    if a == 0 and b <= 0:
        raise UndefinedError("0 to no positive power")
    bits = max(a.numerator.bit_length(), a.denominator.bit_length())
    return a ** int(b) if b.denominator == 1 and bits * abs(b) <= MAX_BITS else None


_RATIONAL: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negative": lambda a, b: -a,
    "abs": lambda a, b: abs(a),
    "floor": lambda a, b: math.floor(a),
    "ceil": lambda a, b: math.ceil(a),
}
