r"""What stands beside an answer and makes another one of it: ``not 5``, ``half of 5``, ``41 or 42``, ``-\boxed{5}``."""

from __future__ import annotations

import re

from nemorl_math_env.expressions import FUNCTIONS
from nemorl_math_env.units import MODIFIERS

_PART_OF = re.compile(r"([A-Za-z]+)\s+(?:of|to|from)\s+(?:the\s+)?$")
"""``half of 42``."""
_PARTS = (MODIFIERS - {"all", "each", "every", "some", "any", "up", "to", "and"}) | frozenset(
    re.findall(
        r"\S+",
        """
        square cube multiple multiples divisor divisors factor factors opposite reciprocal negation inverse complement
        digit digits logarithm sine cosine tangent next close far
        """,
    )
)
_DENIED_JUST_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|besides)\b|n[’']t\b)(?:\s+[a-z]+)?\s*$", re.IGNORECASE
)
DOUBTED = re.compile(
    r"(?:(?:n[’']t|\bnot|\bnever)\s+(?:think|believe|say|claim)|\bdoubt|\bdeny)\s+(?:that\s+)?(?:the\s+)?(?:final\s+|correct\s+)?$",
    re.IGNORECASE,
)
"""``I don't think the`` (answer is 5)."""
_OTHER_BEFORE = re.compile(r"(?:^|[\s(])\$?[-\d.,/]+\$?,?\s*(?:or|and|vs\.?|to|,)\s*$", re.IGNORECASE)
"""``41 or``."""
CHANGED = re.compile(
    r"\b(?:at (?:least|most)|(?:more|less|fewer|greater|other|rather|larger|smaller|higher|lower) than|over|under|above"
    r"|below|up to|close to|between|either|about|around|approximately|almost|nearly|roughly)\s+(?:[a-z]+\s+)?$",
    re.IGNORECASE,
)
CHANGING_BEFORE = MODIFIERS | FUNCTIONS | {"near", "root", "than", "besides"}
CHANGING_BEFORE -= {"to", "all", "and", "some", "positive", "up"}
"""``twice 5``, ``sqrt 5``."""
BOXED_PART = re.compile(
    r"(?:[-+/^\d]|\}\s?\{|\\(?:cdot|times)\s?|\\(?:sqrt|[dt]?frac)|(?:\\sqrt|\^|\\[dt]?frac)\{)\Z", re.ASCII
)
BESIDE_BOX = re.compile(
    r"\s*(?:[\^_]|!(?!\s|\Z))[^\s$]*|\d+|\{[^\s$]*"
    r"|[-+*/](?=[\d.(\\]|[A-Za-z](?![A-Za-z]))[^\s$]*|[ ]?[+*/][ ]?\d[^\s$]*",
    re.ASCII,
)
r"""What makes a part of an expression of the box beside it: ``-\boxed{5}``, ``\boxed{5}^2``."""


def is_changed(before: str) -> bool:
    """The words right before a formula deny it or make another value of it: ``not``, ``41 or``, ``half of``."""
    beside = re.search(r"([A-Za-z]+)\s*$", before)
    return (
        (beside is not None and beside[1].casefold() in CHANGING_BEFORE - {"or", "than"})
        or _DENIED_JUST_BEFORE.search(before) is not None
        or _OTHER_BEFORE.search(before) is not None
        or CHANGED.search(before) is not None
        or is_part(before)
    )


def is_part(before: str) -> bool:
    """``half of``, ``the square root of``."""
    found = _PART_OF.search(before)
    return found is not None and found[1].casefold() in _PARTS
