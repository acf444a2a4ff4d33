"""Whether two answers are equal, given a judge of single values.

The judge may leave a pair open (``None``), as the one without algebra does. Then the whole stays open, unless another
part already decides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from nemorl_math_env.expressions import Tree, symbols
from nemorl_math_env.forms import Brackets, Chain, Form, Matrix, Name, Scalar, Series, Words

_FLIPPED = {">": "<", "≥": "≤", "<": ">", "≤": "≥"}


class Judge(Protocol):
    """Decides about single values and sides of equations, or leaves them open."""

    def equal(self, expected: Scalar, given: Scalar) -> bool | None:
        """Both are the same value."""
        ...

    def proportional(self, expected: Tree, given: Tree, *, positive: bool) -> bool | None:
        """One formula is a constant (positive) multiple of the other."""
        ...


def equal_forms(expected: Form, given: Form, judge: Judge) -> bool | None:
    """The given answer is the expected one; ``None`` where the judge leaves that open."""
    if isinstance(expected, Chain) or isinstance(given, Chain):
        return _equal_with_chain(expected, given, judge)
    if isinstance(expected, Scalar) and isinstance(given, Scalar):
        return judge.equal(expected, given)
    if isinstance(expected, Words) and isinstance(given, Words):
        return bool(expected.text) and expected.text == given.text
    if isinstance(expected, Matrix) and isinstance(given, Matrix):
        if [len(row) for row in expected.rows] != [len(row) for row in given.rows]:
            return False
        return _all(_in_order(a, b, judge) for a, b in zip(expected.rows, given.rows, strict=True))
    if isinstance(expected, Brackets) and isinstance(given, Brackets):
        # Round or square makes no difference to a vector, but all the difference to an interval.
        if len(expected.items) == 2 and (expected.opening, expected.closing) != (given.opening, given.closing):
            return False
        return _in_order(expected.items, given.items, judge)
    return _equal_series(expected, given, judge)


def _equal_series(expected: Form, given: Form, judge: Judge) -> bool | None:
    expected, given = _without_braces(expected, given), _without_braces(given, expected)
    if isinstance(expected, Scalar) and isinstance(given, Scalar):
        return judge.equal(expected, given)
    for one, other in ((expected, given), (given, expected)):
        # A point written without its brackets.
        if isinstance(one, Brackets) and isinstance(other, Series) and other.kind == "list":
            is_point = (one.opening, one.closing) == ("(", ")")
            return _in_order(_items(expected), _items(given), judge) if is_point else False
    if not isinstance(expected, Series) or not isinstance(given, Series):
        return False
    kinds = {expected.kind, given.kind}
    if "ratio" in kinds:
        return _in_order(expected.items, given.items, judge) if len(kinds) == 1 else False
    if "union" in kinds and len(kinds) == 2:  # x < 1 or x > 3
        listed = expected if given.kind == "union" else given
        if not all(isinstance(item, Chain) for item in listed.items):
            return False
    # x = 1, y = 2 is no set of two numbers.
    if max(_names(expected), _names(given)) > 1 and min(_names(expected), _names(given)) == 0:
        return _in_order(expected.items, given.items, judge)
    return _in_any_order(expected.items, given.items, judge)


def _names(series: Series) -> int:
    """Different names that a list of equations gives values to."""
    firsts = [item.items[0] for item in series.items if isinstance(item, Chain)]
    return len({first.text for first in firsts if isinstance(first, Name)})


def _without_braces(form: Form, beside: Form) -> Form:
    """The member of a set of one, beside a single value."""
    alone = isinstance(form, Series) and form.kind == "set" and len(form.items) == 1 and isinstance(beside, Scalar)
    return form.items[0] if alone and isinstance(form, Series) else form


def _items(form: Form) -> tuple[Form, ...]:
    return form.items if isinstance(form, Series | Brackets) else (form,)


def _in_order(expected: Sequence[Form], given: Sequence[Form], judge: Judge) -> bool | None:
    if len(expected) != len(given):
        return False
    return _all(equal_forms(a, b, judge) for a, b in zip(expected, given, strict=True))


def _in_any_order(expected: Sequence[Form], given: Sequence[Form], judge: Judge) -> bool | None:
    """Each of one finds its own of the other. Equality being transitive, the first that fits will do."""
    if len(expected) != len(given):
        return False
    left = list(given)
    is_open = False
    for item in expected:
        verdicts = [equal_forms(item, other, judge) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            is_open = True
        else:
            return False
    return None if is_open else True


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """True if all are, False if any is, else open."""
    is_open = False
    for verdict in verdicts:
        if verdict is False:
            return False
        is_open |= verdict is None
    return None if is_open else True


# Equations and inequalities


class _Assigned(NamedTuple):
    """An answer that gives a value: ``x = 2``, ``3 + 4 = 7``, or the value alone."""

    name: str
    is_simple: bool
    value: Form
    holds: bool | None
    """All sides that should be equal are."""


def _equal_with_chain(expected: Form, given: Form, judge: Judge) -> bool | None:
    if expected == given and not _is_false(expected, judge):
        return True
    wanted, found = _assigned(expected, judge), _assigned(given, judge)
    if wanted is not None and wanted.is_simple:
        # An equation to be solved is no solution: 2x = 6 is not x = 3.
        if found is not None:
            if wanted.name and found.name and wanted.name != found.name:
                return False
            return _all([found.holds, equal_forms(wanted.value, found.value, judge)])
        return _equal_intervals(expected, given, judge)
    interval = _equal_intervals(expected, given, judge)
    if interval is not False:
        return interval
    if not isinstance(expected, Chain) or not isinstance(given, Chain):
        return False
    return _equal_relations(expected, given, judge)


def _is_false(form: Form, judge: Judge) -> bool:
    assigned = _assigned(form, judge)
    return assigned is not None and assigned.holds is False


def _assigned(form: Form, judge: Judge) -> _Assigned | None:
    if not isinstance(form, Chain):
        return _Assigned("", True, form, True)
    # x ≈ 5 gives a value; 5 ≈ 6 takes it back.
    if set(form.relations) != {"="} and form.relations not in (("∈",), ("≈",)):
        return None
    name, is_simple, sides = "", True, form.items
    if isinstance(sides[0], Name):
        name, is_simple, sides = sides[0].text, sides[0].is_simple, sides[1:]
    elif form.relations == ("≈",) or not all(isinstance(side, Scalar) and not symbols(side.tree) for side in sides):
        return None
    holds = _all(equal_forms(a, b, judge) for a, b in pairwise(sides))
    return _Assigned(name, is_simple, sides[-1], holds)


class _Interval(NamedTuple):
    name: str
    low: Form | None
    low_closed: bool
    high: Form | None
    high_closed: bool


def _equal_intervals(expected: Form, given: Form, judge: Judge) -> bool | None:
    a, b = _as_interval(expected), _as_interval(given)
    if a is None or b is None or (a.name and b.name and a.name != b.name):
        return False
    if (a.low_closed, a.high_closed) != (b.low_closed, b.high_closed):
        return False
    return _all(
        x is y if x is None or y is None else equal_forms(x, y, judge) for x, y in ((a.low, b.low), (a.high, b.high))
    )


def _as_interval(form: Form) -> _Interval | None:
    """``1 < x ≤ 3``, ``x > 2`` and ``(1, 3]`` as intervals."""
    if isinstance(form, Brackets) and len(form.items) == 2:
        low, high = (None if _is_infinite(item) else item for item in form.items)
        return _Interval("", low, form.opening == "[", high, form.closing == "]")
    if not isinstance(form, Chain):
        return None
    if form.relations == ("∈",) and isinstance(form.items[0], Name):
        inside = _as_interval(form.items[1])
        return None if inside is None else inside._replace(name=form.items[0].text)
    if not set(form.relations) <= set(_FLIPPED):
        return None
    items, relations = form.items, form.relations
    if relations[0] in ">≥":
        items, relations = items[::-1], tuple(_FLIPPED[relation] for relation in relations[::-1])
    if not set(relations) <= set("<≤"):
        return None
    variables = [index for index, item in enumerate(items) if isinstance(item, Scalar) and item.tree[0] == "symbol"]
    if len(variables) != 1 or (len(items) == 3 and variables != [1]):
        return None
    at = variables[0]
    low, high = (items[at - 1] if at else None), (items[at + 1] if at + 1 < len(items) else None)
    low, high = (None if item is None or _is_infinite(item) else item for item in (low, high))
    return _Interval(
        items[at].text,  # type: ignore[union-attr]
        low,
        low is not None and relations[at - 1] == "≤",
        high,
        high is not None and relations[-1] == "≤",
    )


def _is_infinite(form: Form) -> bool:
    infinity = ("constant", "infty")
    return isinstance(form, Scalar) and form.tree in (infinity, ("negative", infinity))


def _equal_relations(expected: Chain, given: Chain, judge: Judge) -> bool | None:
    """Equations of curves, and inequalities in several variables."""
    a, b = _ascending(expected), _ascending(given)
    if a.relations != b.relations:
        return False
    if len(a.relations) > 1:
        return _in_order([_unnamed(item) for item in a.items], [_unnamed(item) for item in b.items], judge)
    trees = []
    for chain in (a, b):
        left, right = (_unnamed(item) for item in chain.items)
        if not isinstance(left, Scalar) or not isinstance(right, Scalar):
            return _in_order([_unnamed(item) for item in a.items], [_unnamed(item) for item in b.items], judge)
        trees.append(("subtract", left.tree, right.tree))
    return judge.proportional(trees[0], trees[1], positive=a.relations[0] in "<≤")


def _ascending(chain: Chain) -> Chain:
    if chain.relations[0] not in ">≥":
        return chain
    return Chain(chain.items[::-1], tuple(_FLIPPED.get(relation, relation) for relation in chain.relations[::-1]))


def _unnamed(form: Form) -> Form:
    return form.form if isinstance(form, Name) else form
