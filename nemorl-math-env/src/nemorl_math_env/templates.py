"""The stories behind ``word_problems``: data only.

Variables are free: any values in range make a sound problem. What would need a condition is derived instead: 'had t,
gave away a' takes ``a`` and what is left, and computes ``t``. So every problem has a whole, non-negative answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

NAMES = (
    *("Ana", "Ben", "Chloe", "Daniel", "Ella", "Finn", "Grace"),
    *("Hugo", "Iris", "Jack", "Kate", "Leo", "Maya", "Noah"),
)
FACTORS = frozenset("nmk")
"""Variables that multiply; they have a smaller range than counts."""


@dataclass(frozen=True)
class Template:
    """One story."""

    steps: int
    """Operations needed, which is also its difficulty."""
    variables: str
    """One letter each: ``n``, ``m``, ``k`` are factors, others are counts."""
    text: str
    """The story, with ``{name}``, variables and derived values as placeholders."""
    working: str
    """The calculation, for supervised training."""
    solve: Callable[..., Mapping[str, int]]
    """Variables -> ``answer`` and derived values."""


_ONE_STEP = (
    Template(1, "ab", "{name} has {a} apples and buys {b} more. How many apples does {name} have now?",
             "{a} + {b} = {answer}", lambda a, b: {"answer": a + b}),
    Template(1, "ab", "{name} had {t} stickers and gave away {a}. How many stickers are left?",
             "{t} - {a} = {answer}", lambda a, b: {"t": a + b, "answer": b}),
    Template(1, "an", "One pencil costs {a} dollars. How many dollars do {n} pencils cost?",
             "{n} * {a} = {answer}", lambda a, n: {"answer": n * a}),
    Template(1, "an", "{t} cookies are shared equally among {n} children. How many cookies does each child get?",
             "{t} / {n} = {answer}", lambda a, n: {"t": a * n, "answer": a}),
    Template(1, "ab", "{name} is {a} years old. How old will {name} be in {b} years?",
             "{a} + {b} = {answer}", lambda a, b: {"answer": a + b}),
    Template(1, "ab", "{name} walks {a} km in the morning and {b} km in the evening. How many km is that in total?",
             "{a} + {b} = {answer}", lambda a, b: {"answer": a + b}),
    Template(1, "ab", "A bus has {t} passengers. At a stop, {a} get off. How many passengers are still on the bus?",
             "{t} - {a} = {answer}", lambda a, b: {"t": a + b, "answer": b}),
    Template(1, "an", "There are {n} boxes with {a} balls in each. How many balls are there in total?",
             "{n} * {a} = {answer}", lambda a, n: {"answer": n * a}),
    Template(1, "ab", "A book has {t} pages. {name} has read {a} pages. How many pages are left to read?",
             "{t} - {a} = {answer}", lambda a, b: {"t": a + b, "answer": b}),
    Template(1, "ab", "A class has {a} girls and {b} boys. How many children are in the class?",
             "{a} + {b} = {answer}", lambda a, b: {"answer": a + b}),
    Template(1, "ab", "{name} is {t} years old. How old was {name} {a} years ago?",
             "{t} - {a} = {answer}", lambda a, b: {"t": a + b, "answer": b}),
    Template(1, "an", "{name} reads {a} pages every day. How many pages does {name} read in {n} days?",
             "{n} * {a} = {answer}", lambda a, n: {"answer": n * a}),
    Template(1, "ab", "{name} pays for a toy that costs {a} dollars with {t} dollars. How many dollars come back?",
             "{t} - {a} = {answer}", lambda a, b: {"t": a + b, "answer": b}),
    Template(1, "an", "{name} plants {t} flowers in {n} equal rows. How many flowers are in each row?",
             "{t} / {n} = {answer}", lambda a, n: {"t": a * n, "answer": a}),
)  # fmt: skip

_TWO_STEPS = (
    Template(2, "anb", "{name} buys {n} notebooks for {a} dollars each and a bag for {b} dollars. "
             "How many dollars does {name} spend?",
             "{n} * {a} = {x}\n{x} + {b} = {answer}", lambda a, n, b: {"x": n * a, "answer": n * a + b}),
    Template(2, "abc", "{name} had {t} marbles, lost {a} of them and then found {b}. How many marbles does {name} "
             "have now?",
             "{t} - {a} = {c}\n{c} + {b} = {answer}", lambda a, b, c: {"t": a + c, "answer": c + b}),
    Template(2, "abn", "{name} is {a} years old. A brother is {n} times as old. In {b} years, how old will the "
             "brother be?",
             "{n} * {a} = {x}\n{x} + {b} = {answer}", lambda a, b, n: {"x": n * a, "answer": n * a + b}),
    Template(2, "abn", "A train travels {a} km in an hour. After {n} hours it still has {b} km to go. How many km "
             "long is the whole trip?",
             "{n} * {a} = {x}\n{x} + {b} = {answer}", lambda a, b, n: {"x": n * a, "answer": n * a + b}),
    Template(2, "abn", "{name} has {t} candies, keeps {b} and shares the rest equally among {n} friends. How many "
             "candies does each friend get?",
             "{t} - {b} = {x}\n{x} / {n} = {answer}", lambda a, b, n: {"t": a * n + b, "x": a * n, "answer": a}),
    Template(2, "abc", "A library has {a} novels, {b} comics and {c} magazines. How many items is that in total?",
             "{a} + {b} = {x}\n{x} + {c} = {answer}", lambda a, b, c: {"x": a + b, "answer": a + b + c}),
    Template(2, "abn", "A baker makes {n} trays of {t} rolls and sells {a} rolls. How many rolls are left?",
             "{n} * {t} = {x}\n{x} - {a} = {answer}",
             lambda a, b, n: {"t": a + b, "x": n * (a + b), "answer": n * (a + b) - a}),
    Template(2, "anm", "A farm has {n} fields with {m} rows of {a} trees each. How many trees are there?",
             "{n} * {m} = {x}\n{x} * {a} = {answer}", lambda a, n, m: {"x": n * m, "answer": n * m * a}),
    Template(2, "abc", "{name} saved {t} dollars, spent {a} on a game and {b} on lunch. How many dollars are left?",
             "{t} - {a} = {x}\n{x} - {b} = {answer}", lambda a, b, c: {"t": a + b + c, "x": b + c, "answer": c}),
    Template(2, "abn", "{a} girls and {b} boys get {n} balloons each. How many balloons is that in total?",
             "{a} + {b} = {x}\n{x} * {n} = {answer}", lambda a, b, n: {"x": a + b, "answer": (a + b) * n}),
)  # fmt: skip

_THREE_STEPS = (
    Template(3, "abnm", "{name} buys {n} shirts for {a} dollars each and {m} hats for {b} dollars each. How many "
             "dollars is that in total?",
             "{n} * {a} = {x}\n{m} * {b} = {y}\n{x} + {y} = {answer}",
             lambda a, b, n, m: {"x": n * a, "y": m * b, "answer": n * a + m * b}),
    Template(3, "abcn", "{name} has {a} dollars and earns {b} dollars a day for {n} days. Then {name} gets {c} dollars "
             "as a gift. How many dollars does {name} have at the end?",
             "{n} * {b} = {x}\n{a} + {x} = {y}\n{y} + {c} = {answer}",
             lambda a, b, c, n: {"x": n * b, "y": a + n * b, "answer": a + n * b + c}),
    Template(3, "abcn", "A theater has {n} sections of {t} seats. {a} seats are broken in each section, and {c} of "
             "the working seats are reserved in every section. How many seats are free?",
             "{t} - {a} = {x}\n{x} - {c} = {b}\n{n} * {b} = {answer}",
             lambda a, b, c, n: {"t": a + b + c, "x": b + c, "answer": n * b}),
    Template(3, "abnm", "A truck drives {a} km an hour for {n} hours and {b} km an hour for {m} hours. How many km "
             "does it drive in total?",
             "{n} * {a} = {x}\n{m} * {b} = {y}\n{x} + {y} = {answer}",
             lambda a, b, n, m: {"x": n * a, "y": m * b, "answer": n * a + m * b}),
    Template(3, "abcn", "{name} picks {t} plums and {b} pears, gives away {c} of the fruits and packs the rest into "
             "{n} equal bags. How many fruits are in each bag?",
             "{t} + {b} = {x}\n{x} - {c} = {y}\n{y} / {n} = {answer}",
             lambda a, b, c, n: {"t": a * n + c, "b": b * n, "x": (a + b) * n + c, "y": (a + b) * n, "answer": a + b}),
    Template(3, "abcn", "{name} is {a} years old. An aunt is {n} times as old, and an uncle is {b} years older than "
             "the aunt. How old will the uncle be in {c} years?",
             "{n} * {a} = {x}\n{x} + {b} = {y}\n{y} + {c} = {answer}",
             lambda a, b, c, n: {"x": n * a, "y": n * a + b, "answer": n * a + b + c}),
    Template(3, "abcn", "A shop had {t} bottles and sold {a} on Monday and {b} on Tuesday. The rest goes into crates "
             "of {n}. How many crates are needed?",
             "{t} - {a} = {x}\n{x} - {b} = {y}\n{y} / {n} = {c}",
             lambda a, b, c, n: {"t": a + b + c * n, "x": b + c * n, "y": c * n, "answer": c}),
    Template(3, "abnm", "{name} has {n} shelves with {m} boxes each, and {a} toys are in every box. {name} buys {b} "
             "more toys. How many toys are there now?",
             "{n} * {m} = {x}\n{x} * {a} = {y}\n{y} + {b} = {answer}",
             lambda a, b, n, m: {"x": n * m, "y": n * m * a, "answer": n * m * a + b}),
)  # fmt: skip

TEMPLATES = _ONE_STEP + _TWO_STEPS + _THREE_STEPS
