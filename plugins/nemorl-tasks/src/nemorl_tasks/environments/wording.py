"""The effect of the words round an answer: another answer beside it, a denial, a quantity that is not the answer.

Graders that read one letter or number out of a response pay for it only where it stands for itself. In English, and for
alternatives in the other languages of multilingual MMLU.
"""

from __future__ import annotations

import re

NEAR_CHARS = 60
"""How far before and after an answer its own words stand."""
_OR = (
    r"or|and|and/or|versus|vs\.?|oder|und|ou|et|o|u|y|e|atau|dan|au|na|tàbí|àti|অথবা|এবং|বা|या|और|또는|과|와|或|或者|和|及|または|か|と"
    r"|أو|و|to|through"
)
_JOINED = rf"(?:(?<!\w)(?:{_OR})(?!\w)|[/|&+–—])"
_DRESS = r"(?:[\s*_$(){}\[\]\\:=]|boxed|text|mathrm|mathbf){0,12}"
"""Markdown and LaTeX round an answer."""
_ENDS = re.compile(r"[.!?;:\n。！？；：](?=\s|$)")
_NOT = (
    r"not|never|no|neither|nor|isn't|wasn't|aren't|cannot|can't|couldn't|shouldn't|won't|except|but|wrong|incorrect"
    r"|rather than|instead of|unlike|ruled? out|eliminated?|exclud\w+"
)
_FILLERS = r"(?:\s+(?:be|is|equal|to|the|a|an|answer|option|choice|number|value|exactly|really|just))*"
_DENIED_BEFORE = re.compile(rf"(?:\b(?:{_NOT})|[≠!]=?|\\neq?){_FILLERS}{_DRESS}$", re.IGNORECASE)
_SCALES = (
    r"half|third|quarter|twice|double|triple|thrice|times|minus|plus|less|more|fewer|greater|smaller|larger|higher|lower"
    r"|under|over|below|above|between|from|at least|at most|up to|about|around|approximately|roughly|nearly|almost|some"
    r"|maybe|perhaps|possibly|probably|either|one|any|among|square|cube|root|squared|log|sqrt|negative"
)
_SIGNS = r"[<≤≥≈~±√×·/^+%]|(?<![a-z])>|(?<!\*)\*(?!\*)|\d\s*-"
_SCALED_BEFORE = re.compile(
    rf"(?:\b(?:{_SCALES})(?:\s+(?:than|of|the|by|to))*|\b(?:between|from|of)\s+\S{{1,20}}(?:\s+(?:and|to)|,)|{_SIGNS}){_DRESS}$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"^[\s*_$)}\]\\.,]*(?:(?:(?:is|was|are|would be|seems|looks)\s+)?(?:not\b|never\b|wrong|incorrect|false|impossible"
    r"|no\b|nope|isn't|wasn't|can't|cannot)|\?|or so\b)",
    re.IGNORECASE,
)


def is_denied(before: str, after: str) -> bool:
    """The words before or after an answer take it back.

    >>> is_denied("The answer is not ", ""), is_denied("Answer: ", " is wrong"), is_denied("Answer: ", ", not 41")
    (True, True, False)
    """
    if re.match(r"[\s*_$)}\]\\]*,\s*(?:and\s+)?not\b", after, re.IGNORECASE):  # of another one
        after = ""
    return bool(_DENIED_BEFORE.search(sentence_before(before)) or _DENIED_AFTER.match(after[:NEAR_CHARS]))


def is_scaled(before: str) -> bool:
    """The words before a number make another one of it.

    >>> is_scaled("half of "), is_scaled("more than "), is_scaled("The answer is ")
    (True, True, False)
    """
    return bool(_SCALED_BEFORE.search(sentence_before(before)))


def has_alternative(before: str, after: str, other: str) -> bool:
    """Another answer is offered beside an answer.

    Args:
        before: What stands before it.
        after: What stands after it.
        other: A regular expression of answers.

    >>> has_alternative("", " or C", "[A-D]"), has_alternative("", " because A is wrong", "[A-D]")
    (True, False)
    """
    joined = rf"{_DRESS}(?:{_JOINED}|,)"
    follows = re.match(
        rf"{joined}(?:\s*(?:{_OR}|maybe|perhaps|possibly)\s+)?{_DRESS}(?:{other})(?![\w'])(?P<rest>[^\n]{{0,9}})",
        after,
        re.I,
    )
    if follows is not None and (
        "," not in follows[0][:14] or re.match(r"[\s)}\]$*_.]*(?:$|,|(?:or|and)\b)", follows["rest"])
    ):
        return True
    return bool(
        re.search(
            rf"(?<![\w.])(?:{other}){_DRESS}(?<!\w)(?:or|oder|ou|atau|/|\|){_DRESS}$", sentence_before(before), re.I
        )
    )


def sentence_before(text: str) -> str:
    """The end of a text from where its last sentence begins."""
    near = text[-NEAR_CHARS:]
    ends = [found.end() for found in _ENDS.finditer(near) if found[0] != ":"]
    return near[ends[-1] :] if ends else near
