r"""Values of formulas, exact where they are rational, and the test that two formulas are one function.

Two formulas are equal if they agree at several points. Rational operations are exact (:class:`Fraction`); the others
have 60 and then 120 digits, so that a difference that is rounding shrinks by the second half and a real one does not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
from mpmath import mpc

from nemorl_math_env.exact import UndefinedError, exact_step
from nemorl_math_env.expressions import Tree, symbols

POINTS, MANY_POINTS = 8, 48
"""Points for most formulas, and for those with branches (``|x|``, roots), which may agree on one branch alone."""
ENOUGH_FRAC = 0.4
"""At this share of the points both formulas must have a value."""
LOW_DIGITS, HIGH_DIGITS = 60, 120
MAX_LOG2 = 10**6
"""Numbers beyond 2 to this power have no value here."""

Value = Any
"""A ``Fraction`` where it is exact, else an ``mpmath.mpc``, which has no type."""


def same_function(expected: Tree, given: Tree) -> bool:
    """Both formulas have the same variables, and equal values wherever both have one.

    A formula without a value at most of the points is equal to none.
    """
    variables = sorted(symbols(expected))
    if symbols(expected) != symbols(given):
        return False
    points = 1 if not variables else MANY_POINTS if _has_branches(expected) or _has_branches(given) else POINTS
    agreed = 0
    for index in range(points):
        point = {name: _coordinate(name, index) for name in variables}
        equal = _equal_at(expected, given, point)
        if equal is False:
            return False
        agreed += equal is True
    return agreed >= ENOUGH_FRAC * points


def constant_ratio(expected: Tree, given: Tree, *, positive: bool) -> bool:
    """One formula is a constant other than 0 times the other."""
    variables = sorted(symbols(expected) | symbols(given))
    if not variables:
        return False
    ratio: Value | None = None
    for index in range(POINTS):
        point = {name: _coordinate(name, index) for name in variables}
        try:
            above, below = evaluate(expected, point, HIGH_DIGITS), evaluate(given, point, HIGH_DIGITS)
            if above == 0 or below == 0:
                return False
            here: Value = above / below
        except (ArithmeticError, ValueError):
            return False
        if positive and not mpmath.re(_complex(here)) > 0:
            return False
        if ratio is None:
            ratio = here
        elif not _close(ratio, here):
            return False
    return True


def constant_value(tree: Tree) -> Any:
    """The value of a formula without variables, or ``None``."""
    if symbols(tree):
        return None
    try:
        return evaluate(tree, {}, LOW_DIGITS)
    except (ArithmeticError, ValueError):
        return None


def _close(a: Value, b: Value) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return bool(a == b)
    with mpmath.workdps(HIGH_DIGITS):
        x, y = _complex(a), _complex(b)
        return bool(abs(x - y) <= mpmath.mpf(10) ** -50 * max(abs(x), abs(y)))


def _equal_at(expected: Tree, given: Tree, point: Mapping[str, Fraction]) -> bool | None:
    """``None`` where one of them has no value."""
    gaps: list[Any] = []
    scale: Any = 0
    for digits in (LOW_DIGITS, HIGH_DIGITS):
        try:
            a, b = evaluate(expected, point, digits), evaluate(given, point, digits)
        except (ArithmeticError, ValueError):
            return None
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return bool(a == b)
        with mpmath.workdps(digits):
            x, y = _complex(a), _complex(b)
            gaps.append(abs(x - y))
            scale = max(abs(x), abs(y))
    with mpmath.workdps(HIGH_DIGITS):
        tiny = mpmath.mpf(10) ** -(HIGH_DIGITS - 30) * scale
        return bool(gaps[1] <= tiny or gaps[1] <= mpmath.mpf(10) ** -30 * gaps[0])


def _has_branches(tree: Tree) -> bool:
    if tree[0] in ("abs", "floor", "ceil", "root", "sqrt"):
        return True
    if tree[0] == "power" and (tree[2][0] != "number" or tree[2][1].denominator != 1):
        return True
    return any(_has_branches(part) for part in tree[1:] if isinstance(part, tuple))


@lru_cache(maxsize=4096)
def _coordinate(name: str, index: int) -> Fraction:
    """Between 0.3 and 3 at first, then of all sizes up to 3,000, of either sign, the same on every machine."""
    rng = random.Random(f"{name}/{index}")
    size = Fraction(rng.randrange(3000, 30000), 9973)
    if index >= POINTS:
        size *= Fraction(10) ** rng.randint(-2, 3)
    return rng.choice((-1, 1)) * size


def evaluate(tree: Tree, point: Mapping[str, Fraction], digits: int) -> Value:
    """The value of a formula.

    Raises:
        UndefinedError: It has none, or one of a size that no answer has.
        ArithmeticError: Division by zero and the like.
    """
    with mpmath.workdps(digits):
        return _evaluate(tree, point)


def _evaluate(tree: Tree, point: Mapping[str, Fraction]) -> Value:
    kind = tree[0]
    if kind == "number":
        return Fraction(tree[1])
    if kind == "symbol":
        return point[tree[1]]
    if kind == "constant":
        return _constant(tree[1])
    values = [_evaluate(part, point) for part in tree[1:]]
    rational = [value for value in values if isinstance(value, Fraction)]
    result: Any = None
    if len(rational) == len(values):
        result = exact_step(kind, rational)
        if result is None and kind == "power":
            result = _real_root(rational[0], rational[1])
    if result is None:
        result = _approximate(kind, [_complex(value) for value in values])
    if not isinstance(result, Fraction):
        result = mpc(result)
        if not mpmath.isfinite(result) or (result != 0 and abs(mpmath.mag(result)) > MAX_LOG2):
            raise UndefinedError(f"{kind} has no value of this size")
    return result


def _constant(name: str) -> Value:
    if name == "infty":
        raise UndefinedError("infinity is no number")
    return {"pi": mpc(mpmath.pi), "e": mpc(mpmath.e), "i": mpc(0, 1)}[name]


def _complex(value: Value) -> Value:
    return mpc(mpmath.mpf(value.numerator) / value.denominator) if isinstance(value, Fraction) else value


def _approximate(kind: str, values: list[Value]) -> Any:
    a = values[0]
    if kind in _BINARY:
        return _BINARY[kind](a, values[1])
    if kind == "log":
        return mpmath.log(a) / mpmath.log(values[1] if len(values) > 1 else 10)
    if abs(mpmath.mag(a)) > 200 and a != 0 and kind not in ("negative", "abs"):
        raise UndefinedError("an argument of this size")
    return _UNARY[kind](a)


def _real_root(a: Fraction, b: Fraction) -> Any:
    r"""``(-8)^{1/3}`` is -2, like ``\sqrt[3]{-8}``."""
    if not (a < 0 and b.denominator > 1 and b.denominator % 2):
        return None
    size = _power(_complex(-a), _complex(b))
    return -size if b.numerator % 2 else size


def _power(a: Value, b: Value) -> Value:
    if a == 0:
        if mpmath.re(b) <= 0:
            raise UndefinedError("0 to no positive power")
        return mpc(0)
    if abs(mpmath.mag(b)) > 40 and b != 0:
        raise UndefinedError("an exponent of this size")
    return mpmath.power(a, b)


def _root(a: Value, index: Value) -> Value:
    """Odd roots of negative numbers are negative."""
    n = mpmath.re(index)
    if mpmath.im(index) != 0 or n != int(n) or not 1 <= n <= 1000:
        raise UndefinedError("a root of this index")
    if mpmath.im(a) == 0 and mpmath.re(a) < 0 and int(n) % 2:
        return -mpmath.root(-a, int(n))
    return mpmath.root(a, int(n))


def _divide(a: Value, b: Value) -> Value:
    if b == 0:
        raise UndefinedError("division by zero")
    return a / b


_BINARY: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": _divide,
    "power": _power,
    "root": _root,
    "binomial": mpmath.binomial,
}
_UNARY: dict[str, Any] = {
    "negative": lambda a: -a,
    "abs": abs,
    "factorial": mpmath.factorial,
    "degrees": lambda a: a * mpmath.pi / 180,
    "floor": lambda a: mpmath.floor(mpmath.re(a)),
    "ceil": lambda a: mpmath.ceil(mpmath.re(a)),
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "ln": mpmath.log,
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "tan": mpmath.tan,
    "cot": mpmath.cot,
    "sec": mpmath.sec,
    "csc": mpmath.csc,
    "sinh": mpmath.sinh,
    "cosh": mpmath.cosh,
    "tanh": mpmath.tanh,
    "exp": mpmath.exp,
    "sqrt": mpmath.sqrt,
}
