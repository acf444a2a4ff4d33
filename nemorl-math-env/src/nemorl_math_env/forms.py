r"""The shape of an answer: one value, several, a pair, a set, an interval, an equation, an inequality, or words.

:func:`read_form` never fails: what has no mathematical shape is words, and equal only to the same words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from nemorl_math_env.expressions import Tree, try_expression
from nemorl_math_env.quantities import Quantity, quantity_of
from nemorl_math_env.spelling import ROW_END, remembered, spelled, strip_wrapping, tidy, words
from nemorl_math_env.units import NONE, Unit, read_unit

MAX_ITEMS = 50
MAX_NESTING = 6


@dataclass(frozen=True)
class Scalar:
    """One value: a plain number, or a formula that algebra can compare."""

    text: str
    tree: Tree
    quantity: Quantity | None = None
    unit: Unit = NONE


@dataclass(frozen=True)
class Words:
    """Anything else, compared as text."""

    text: str


@dataclass(frozen=True)
class Series:
    """Several values: ``list`` and ``set`` in any order, ``union`` of intervals in any order, ``ratio`` in this one."""

    kind: str
    items: tuple[Form, ...]


@dataclass(frozen=True)
class Brackets:
    """Values in an order: a point, a vector, an interval."""

    opening: str
    items: tuple[Form, ...]
    closing: str


@dataclass(frozen=True)
class Chain:
    """Values joined by relations: ``y = 2x + 1``, ``1 < x ≤ 3``, ``x ∈ (1, 2)``."""

    items: tuple[Form, ...]
    relations: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of values."""

    rows: tuple[tuple[Form, ...], ...]


@dataclass(frozen=True)
class Name:
    """The left side of an equation that only says what is asked for: ``x``, ``f(x)``, ``Area``, ``m+n``."""

    text: str
    form: Form
    """The same, read as a value."""
    is_simple: bool
    """No sum or product of variables, as which it could be half of an equation of a curve."""


Form = Scalar | Words | Series | Brackets | Chain | Matrix | Name

_MATRIX = re.compile(r"\\begin\s*\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_NAME = re.compile(r"(?:[A-Za-z'()|°+\-/, ]|\\[A-Za-z]+|[{}]|_\{?[A-Za-z0-9,]+\}?)+|[fghFGHPQ]'*\(-?\d+\)")
_SIMPLE_NAME = re.compile(
    r"(?:[A-Za-z]|\\(?!frac|sqrt)[a-z]+)(?:_\{?\w+\}?)?'*(?:\([A-Za-z]\))?"  # x, \theta, x_1, f(x), f'
    r"|[fghFGHPQ]'*\(-?\d+\)"  # f(3)
    r"|\|?(?:\\(?:angle|overline|triangle)\s*\{?)?\s*[A-Z]{2,3}\}?\|?"  # AB, \angle ABC
    r"|\([A-Za-z](?:, ?[A-Za-z])+\)"  # (x, y)
    r"|[A-Za-z][a-z]{3,}(?: [A-Za-z]+)*"
)
_OPENING, _CLOSING = "([{", ")]}"


@remembered
def read_form(text: str) -> Form:
    """The shape of a text, with everything in it read as far as it can be."""
    return _read(tidy(strip_wrapping(text)), 0)


def _read(text: str, nesting: int) -> Form:
    plain = re.sub(r"^\\text\{(\w)\}$", r"\1", text.strip())
    if nesting > MAX_NESTING or not plain:
        return Words(words(plain))
    if re.fullmatch(r"[A-Za-z]{2,}", plain):  # yes, Monday, AB: no product
        return Words(plain if len(plain) < 4 and not re.search("[aeiou]", plain, re.IGNORECASE) else words(plain))
    equation = re.fullmatch(r"Eq\((.*)\)", plain)
    sides = _split(equation[1], ",") if equation else None
    if sides is not None and len(sides) == 3:
        plain = f"{sides[0]}={sides[2]}"
    scalar = _scalar(plain)
    if scalar is not None and scalar.quantity is not None:
        return scalar
    matrix = _MATRIX.fullmatch(plain)
    if matrix:
        rows = [row for row in matrix.group(2).split(ROW_END) if row.strip()]
        return Matrix(tuple(tuple(_read(cell, nesting + 1) for cell in row.split("&")) for row in rows))
    return (
        (_chain(plain, nesting) if "∈" in plain else None)
        or _series(plain, nesting)
        or _chain(plain, nesting)
        or _brackets(plain, nesting)
        or _plus_minus(plain, nesting)
        or scalar
        or Words(words(plain))
    )


def _scalar(plain: str) -> Scalar | None:
    quantity = quantity_of(plain)
    if quantity is not None:
        value = quantity.value / 100 if quantity.is_percentage else quantity.value
        return Scalar(spelled(plain), ("number", value), quantity, quantity.unit)
    tree = try_expression(plain)
    if tree is not None and not plain.endswith("°"):
        value_or_none = _written_fraction(tree)
        return Scalar(spelled(plain), tree, None if value_or_none is None else Quantity(value_or_none))
    return _with_unit(plain) or (None if tree is None else Scalar(spelled(plain), tree))


def _written_fraction(tree: Tree) -> Fraction | None:
    """The value of ``-{3}/{4}``, which is a number as much as ``-3/4`` is."""
    if tree[0] == "negative":
        value = _written_fraction(tree[1])
        return None if value is None or value <= 0 else -value
    if tree[0] == "number":
        return Fraction(tree[1])
    if tree[0] == "divide" and all(part[0] == "number" and part[1].denominator == 1 for part in tree[1:]):
        return Fraction(tree[1][1], tree[2][1]) if tree[2][1] else None
    return None


def _with_unit(plain: str) -> Scalar | None:
    r"""A formula with a unit that is set apart: ``2\sqrt{3} cm``, ``(180-2x)°``."""
    for found in re.finditer(r"\s+(?=[A-Za-z°]|\\text)|(?=°$)", plain):
        formula, after = plain[: found.start()], plain[found.end() :]
        unit = read_unit(after, apart=bool(found.group()))
        # The angle in \cos 60° belongs to the cosine.
        if not unit or "percent" in unit or (after == "°" and re.search(r"\\(?!frac|pi|sqrt)", formula)):
            continue
        tree = try_expression(formula)
        if tree is not None:
            return Scalar(spelled(formula), tree, None, unit)
    return None


def _chain(plain: str, nesting: int) -> Chain | None:
    pieces = _split(plain, r"[=<>≤≥≠∈≈]")
    if pieces is None:
        return None
    parts, relations = pieces[::2], pieces[1::2]
    if any(not part.strip() for part in parts):
        return None
    if relations == ["="] and re.fullmatch(r"\s*[A-Za-z]\s*", parts[1]) and not _NAME.fullmatch(parts[0]):
        parts.reverse()  # 3 = x
    items = [_read(part, nesting + 1) for part in parts]
    name = parts[0].strip()
    if relations[0] in "=∈≈" and _NAME.fullmatch(name):
        items[0] = Name(spelled(name), _scalar(name) or items[0], _SIMPLE_NAME.fullmatch(name) is not None)
    return Chain(tuple(items), tuple(relations))


def _series(plain: str, nesting: int) -> Series | None:
    for kind, pattern in (("union", "∪"), ("list", r"[,;]\s*(?:and|or)\b|[,;]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")):
        pieces = _split(plain, pattern)
        if pieces is not None:
            parts = pieces[::2]
            if len(parts) > MAX_ITEMS or any(not part.strip() for part in parts):
                return None
            return Series(kind, tuple(_read(part, nesting + 1) for part in parts))
    parts = plain.split(":")
    if 2 <= len(parts) <= 4 and all(try_expression(part) for part in parts):
        return Series("ratio", tuple(_read(part, nesting + 1) for part in parts))
    return None


def _brackets(plain: str, nesting: int) -> Form | None:
    braces = plain.startswith("\\{") and plain.endswith("\\}")
    opening, closing = plain[0], plain[-1]
    inside = plain[2:-2] if braces else plain[1:-1]
    if not braces and (opening not in "([" or closing not in ")]"):
        return None
    if _depths(inside) is None:
        return None
    pieces = _split(inside, r"[,;]", thousands=False)  # (1,234) is a point
    parts = [inside] if pieces is None else pieces[::2]
    if len(parts) > MAX_ITEMS or any(not part.strip() for part in parts):
        return None
    items = tuple(_read(part, nesting + 1) for part in parts)
    if braces:
        return Series("set", items)
    return items[0] if len(items) == 1 and opening + closing in ("()", "[]") else Brackets(opening, items, closing)


def _plus_minus(plain: str, nesting: int) -> Series | None:
    if plain.count("±") != 1:
        return None
    before = plain.partition("±")[0].strip()
    plus = plain.replace("±", "+" if before and before[-1] not in "({=" else "")
    return Series("list", (_read(plus, nesting + 1), _read(plain.replace("±", "-"), nesting + 1)))


def _split(text: str, pattern: str, *, thousands: bool = True) -> list[str] | None:
    """Pieces and separators in turn, split outside of brackets; ``None`` where there is nothing to split."""
    depths = _depths(text)
    if depths is None:
        return None
    pieces: list[str] = []
    start = 0
    for found in re.finditer(pattern, text):
        is_thousands = found.group() == "," and re.match(r"(?<=\d),\d{3}(?!\d)", text[max(0, found.start() - 1) :])
        if depths[found.start()] == 0 and not (thousands and is_thousands):
            pieces += [text[start : found.start()], found.group()]
            start = found.end()
    return [*pieces, text[start:]] if pieces else None


def _depths(text: str) -> Sequence[int] | None:
    """How many brackets are open before each character; ``None`` where they do not match. ``(`` may close as ``]``."""
    depths: list[int] = []
    stack: list[str] = []
    for character in text:
        depths.append(len(stack))
        if character in _OPENING:
            stack.append(character)
        elif character in _CLOSING and (not stack or (stack.pop() == "{") != (character == "}")):
            return None
    return None if stack else depths
