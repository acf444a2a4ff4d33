"""Closest valid choice for a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SURE = 0.8
"""How alike two keys are when one is a slip of the other, whatever else has its name."""
COMMON_WORDS = frozenset({"", "num", "n", "nr", "number", "per", "of", "max", "total", "the", "count"})
"""Words of a key that say nothing of what it counts."""
FEW = 3
"""Places that a key may be meant for, when they are said."""


def closest(word: str, choices: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The choice that a word is most like, ``None`` when nothing is close. Equal words have likeness 1.

    Capitals and hyphens count for nothing.

    >>> closest("GRPO", ["gspo", "grpo"]), closest("dr-grpo", ["grpo", "dr_grpo"]), closest("banana", ["grpo"])
    ('grpo', 'dr_grpo', None)
    """
    folded = {_folded(choice): choice for choice in reversed(list(choices))}
    close = difflib.get_close_matches(_folded(word), list(folded)[::-1], n=1, cutoff=likeness)
    return folded[close[0]] if close else None


def did_you_mean(word: str, choices: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """``"Did you mean 'dtensor'?"``, or ``None`` when nothing is close, as :func:`closest` has it."""
    found = closest(word, choices, likeness=likeness)
    return f"Did you mean {found!r}?" if found is not None else None


def in_other_words(key: str, paths: Iterable[str]) -> str | None:
    """The dotted paths whose last key has all telling words of another.

    >>> in_other_words("n_gpus", ["seed", "cluster.gpus_per_node"])
    'perhaps cluster.gpus_per_node is meant'
    """
    words = _words(key)
    found = [path for path in paths if words and words <= _words(path.rpartition(".")[2])]
    return f"perhaps {' or '.join(found)} is meant" if 0 < len(found) <= FEW else None


def nested(path: str, text: str) -> str:
    """The value at a dotted path, as one line of YAML.

    >>> nested("policy.schedule", "kind: cosine")
    'policy: {schedule: {kind: cosine}}'
    """
    for key in reversed(path.split(".")):
        text = f"{key}: {{{text}}}"
    return text


def _words(key: str) -> set[str]:
    return set(key.lower().split("_")) - COMMON_WORDS


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")
