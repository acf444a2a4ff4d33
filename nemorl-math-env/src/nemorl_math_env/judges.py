r"""Two judges of single values: one that decides only what it is sure of at once, and one with algebra.

The quick one runs in the training process; the other one in a grader process, since a formula can take long.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from nemorl_math_env.exact import exact_value
from nemorl_math_env.expressions import Tree, symbols
from nemorl_math_env.forms import Scalar
from nemorl_math_env.quantities import ROUNDED_DIGITS, Quantity, equal_quantities, is_rounded, units_agree

_IRRATIONAL = frozenset(("constant", "root", "power", "ln", "log", "exp", "sin", "cos", "tan", "arctan"))


@dataclass(frozen=True)
class QuickJudge:
    """Compares numbers exactly and formulas as text; everything else stays open."""

    accept_unevaluated: bool = False
    """Arithmetic left undone (``12 + 7``, ``5!``) may stand for a number."""

    def equal(self, expected: Scalar, given: Scalar) -> bool | None:
        if expected.quantity is not None and given.quantity is not None:
            return equal_quantities(expected.quantity, given.quantity)
        if not units_agree(expected.unit, given.unit):
            return False
        if expected.tree == given.tree:
            return True
        if _is_infinite(expected.tree) or _is_infinite(given.tree):
            return False
        if symbols(expected.tree) != symbols(given.tree):
            return False
        if expected.quantity is not None and not self.accept_unevaluated:
            return None if _may_be_rounded(expected.quantity, given.tree) else False
        try:
            a, b = exact_value(expected.tree), exact_value(given.tree)
        except ArithmeticError:
            return False
        return None if a is None or b is None else a == b

    def proportional(self, expected: Tree, given: Tree, *, positive: bool) -> bool | None:
        return True if expected == given else None


@dataclass(frozen=True)
class AlgebraJudge:
    """Decides everything."""

    accept_unevaluated: bool = False

    def equal(self, expected: Scalar, given: Scalar) -> bool:
        from nemorl_math_env.values import same_function

        quick = QuickJudge(self.accept_unevaluated).equal(expected, given)
        if quick is not None:
            return quick
        if same_function(expected.tree, given.tree):
            return expected.quantity is None or self.accept_unevaluated
        return _rounds(expected, given) or _rounds(given, expected)

    def proportional(self, expected: Tree, given: Tree, *, positive: bool) -> bool:
        from nemorl_math_env.values import constant_ratio

        return expected == given or constant_ratio(expected, given, positive=positive)


def _rounds(exact: Scalar, decimal: Scalar) -> bool:
    """The decimal is the value of the formula, rounded to at least six significant digits."""
    from mpmath import nstr

    from nemorl_math_env.values import LOW_DIGITS, constant_value

    if decimal.quantity is None or exact.quantity is not None:
        return False
    value = constant_value(exact.tree)
    if value is None:
        return False
    if not isinstance(value, Fraction):
        if value.imag != 0:
            return False
        value = Fraction(nstr(value.real, LOW_DIGITS))
    return is_rounded(decimal.quantity, value - decimal.quantity.value)


def _may_be_rounded(expected: Quantity, given: Tree) -> bool:
    r"""The truth has so many digits that it may stand for ``\sqrt{2}``."""
    return expected.places is not None and expected.places >= ROUNDED_DIGITS and _is_irrational(given)


def _is_irrational(tree: Tree) -> bool:
    return tree[0] in _IRRATIONAL or any(_is_irrational(part) for part in tree[1:] if isinstance(part, tuple))


def _is_infinite(tree: Tree) -> bool:
    return tree == ("constant", "infty") or any(_is_infinite(part) for part in tree[1:] if isinstance(part, tuple))
