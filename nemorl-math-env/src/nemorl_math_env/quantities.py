r"""Plain numbers, read exactly: ``-1,000.50``, ``$18``, ``3/4``, ``1\frac{1}{2}``, ``2.5e3``, ``3 million``, ``12 cm``.

Two quantities are always decided here, without algebra.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from nemorl_math_env.spelling import remembered, strip_wrapping, tidy
from nemorl_math_env.units import MULTIPLIERS, NONE, Unit, read_unit

MAX_DIGITS = 400
"""Longer numerals are no answers: Python refuses to convert past 4300 digits."""
ROUNDED_DIGITS = 6
"""A decimal with at least so many significant digits after its point may stand for the exact value that it rounds."""

_WHOLE = r"\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?:[ ]\d{3})+(?![ ]?\d)|\d+"
_DECIMAL = rf"(?:(?:{_WHOLE})(?:\.\d+)?|\.\d+)"
_INTEGER = r"\s*[-+]?\s*\d+\s*"
_QUANTITY = re.compile(
    rf"""
    (?P<sign>[-+]?)\s* (?P<currency>[$€£¥₹]?)\s* (?P<inner>[-+]?)\s*
    (?: (?P<mixed>\d+)\s*
        (?: \s(?P<m1>\d+)\s*/\s*(?P<m2>\d+)
          | \\frac\s*(?: \{{(?P<m3>\s*\d+\s*)\}}\s*\{{(?P<m4>\s*\d+\s*)\}} | (?P<m5>\d)\s*(?P<m6>\d)(?!\d) ) )
      | \\frac\s*(?: \{{(?P<f1>{_INTEGER})\}}\s*\{{(?P<f2>{_INTEGER})\}} | (?P<f3>\d)\s*(?P<f4>\d)(?!\d) )
      | (?P<above>{_DECIMAL})\s*/\s*(?P<below>[-+]?\d+)
      | (?P<fixed>\d*)\.(?P<start>\d*)\\overline\s*\{{(?P<cycle>\d+)\}}
      | (?P<plain>{_DECIMAL})
        (?: [eE](?P<e1>[-+]?\d+) | \s*\*\s*10\s*\^\s*(?: (?P<e2>-?\d+) | \{{\s*(?P<e3>[-+]?\d+)\s*\}} ) )?
    )
    (?P<rest>(?![\d.,]).*)
    """,
    re.VERBOSE | re.ASCII | re.DOTALL,
)


@dataclass(frozen=True)
class Quantity:
    """A number with its unit."""

    value: Fraction
    unit: Unit = NONE
    """Meanings of the unit; empty where none was written."""
    places: int | None = None
    """Digits after the point, where it was written as a decimal."""

    @property
    def is_percentage(self) -> bool:
        return "percent" in self.unit


@remembered
def read_quantity(text: str) -> Quantity | None:
    """The exact value of a plain numeral with an optional unit, or ``None`` where the text is anything else."""
    return quantity_of(tidy(strip_wrapping(text)))


def quantity_of(text: str) -> Quantity | None:
    """The same for a text that is tidy."""
    found = _QUANTITY.fullmatch(text)
    if (
        found is None
        or (found["sign"] and found["inner"])
        or any(len(d) > MAX_DIGITS for d in re.findall(r"\d+", text))
    ):
        return None
    value = _value(found)
    if value is None:
        return None
    times, rest = _multiplier(found["rest"])
    unit = _unit(found["currency"], rest)
    if unit is None:
        return None
    places = None
    if found["plain"] and not found["e1"] and not found["e2"] and not found["e3"] and times == 1:
        places = len(found["plain"].partition(".")[2])
    value *= times
    return Quantity(-value if "-" in (found["sign"], found["inner"]) else value, unit, places)


def _value(found: re.Match[str]) -> Fraction | None:
    def pair(above: str, below: str) -> Fraction | None:
        denominator = int(below.replace(" ", ""))
        return Fraction(above.replace(",", "").replace(" ", "")) / denominator if denominator else None

    for above, below in (("f1", "f2"), ("f3", "f4"), ("above", "below")):
        if found[above] is not None:
            return pair(found[above], found[below])
    if found["mixed"] is not None:
        for above, below in (("m1", "m2"), ("m3", "m4"), ("m5", "m6")):
            if found[above] is not None:
                part = pair(found[above], found[below])
                return None if part is None or part >= 1 else int(found["mixed"]) + part
    if found["cycle"] is not None:
        fixed, start, cycle = found["fixed"] or "0", found["start"], found["cycle"]
        tail = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(start))
        return Fraction(f"{fixed}.{start or 0}") + tail
    exponent = int(found["e1"] or found["e2"] or found["e3"] or 0)
    if abs(exponent) > MAX_DIGITS:
        return None
    return Fraction(found["plain"].replace(",", "").replace(" ", "")) * Fraction(10) ** exponent


def _multiplier(rest: str) -> tuple[int, str]:
    first, _, after = rest.strip().partition(" ")
    if rest[:1] in (" ", "") and first.casefold() in MULTIPLIERS:
        return MULTIPLIERS[first.casefold()], f" {after}" if after else ""
    return 1, rest


def _unit(currency: str, rest: str) -> Unit | None:
    before = read_unit(currency, apart=False) if currency else NONE
    after = read_unit(rest.strip(), apart=rest[:1] == " ") if rest.strip() else NONE
    if before is None or after is None:
        return None
    return before & after or None if before and after else before or after


def units_agree(expected: Unit, given: Unit) -> bool:
    """Equal on both sides, or absent on one."""
    return not expected or not given or bool(expected & given)


def equal_quantities(expected: Quantity, given: Quantity) -> bool:
    """The same number in units that agree. ``50%`` is 0.5, and 50 where the other side has no unit."""
    if expected.is_percentage != given.is_percentage:
        percentage, other = (expected, given) if expected.is_percentage else (given, expected)
        if other.unit:
            return False
        return percentage.value / 100 == other.value or (percentage.value == other.value and abs(other.value) > 1)
    if not units_agree(expected.unit, given.unit):
        return False
    if expected.value == given.value:
        return True
    return _rounds(expected, given) or _rounds(given, expected)


def _rounds(exact: Quantity, decimal: Quantity) -> bool:
    """The decimal is the other value, rounded to at least six significant digits."""
    if decimal.places is None or (exact.places is not None and exact.places <= decimal.places):
        return False
    return is_rounded(decimal, exact.value - decimal.value)


def is_rounded(decimal: Quantity, error: Fraction) -> bool:
    """An error this small is due to rounding, and enough digits are left."""
    if decimal.places is None:
        return False
    digits = len(str(abs(int(decimal.value * 10**decimal.places))))
    return min(decimal.places, digits) >= ROUNDED_DIGITS and abs(error) * 2 * 10**decimal.places <= 1
