"""Grading takes shortcuts: rules that cannot match are not tried, short texts are read once. No grade may change."""

from __future__ import annotations

import random
import re

import pytest
from answer_pairs import changed_truths, generated_pairs, written_pairs
from nemorl_math_env import forms, quantities, spelling

PARTS = (
    *("12", "7", "1,000", "3.5", ".5", "-", "−", "+", "+-", "+/-", "/", "*", "**", "x", " x ", "X", "=", "<="),
    *("≥", "!=", "~"),
    *("(", "]", "{", "}", ",", "{,}", "|", "$", "%", "°", "^\\circ", "^ °", " ", "  ", "\n", "\u200b", "\u00a0"),
    *("π", " pi ", "epic", "inf", "info", "infinity", "√2", "¹²", "₂", "½", "m²", "cm", "5 million", "e3"),
    *("not ", "or "),
    *("\\", "\\\\", "\\frac{1}{2}", "\\dfrac12", "\\sqrt{2}", "\\pm", "\\cup", "\\in", "\\left(", "\\,", "\\!", "\\$"),
    *("\\text{ cm}", "\\mathrm{e}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\be\u200bgin", "\\π", "\\var"),
)  # fmt: skip


def odd_texts(count: int) -> list[str]:
    """Joined at random from everything that some rule looks at."""
    rng = random.Random(0)
    return ["".join(rng.choices(PARTS, k=rng.randrange(1, 10))) for _ in range(count)]


def answers() -> list[str]:
    pairs = (*written_pairs(), *generated_pairs(), *changed_truths())
    return list(dict.fromkeys(text for pair in pairs for text in (pair.truth, pair.response)))


def tidy_by_all_rules(text: str) -> str:
    """Every rule on every text, each character looked at."""
    if "\\begin" in text:
        text = text.replace("\\\\", spelling.ROW_END)
    text = spelling._in_ascii(text)
    for rule in spelling.RULES:
        text = rule.pattern.sub(rule.replacement, text)
    return re.sub(r"\s+", " ", text).strip()


@pytest.mark.parametrize("texts", [answers, lambda: odd_texts(4000)], ids=["answers of the pairs", "odd texts"])
def test_rules_that_are_not_tried_would_change_nothing(texts):
    different = [text for text in texts() if spelling.tidy(text) != tidy_by_all_rules(text)]
    assert not different


@pytest.mark.slow
def test_what_is_remembered_is_what_would_be_read_again():
    for text in [*answers(), *odd_texts(1000)]:
        for function in (
            spelling.strip_wrapping,
            spelling.words,
            spelling.spelled,
            quantities.read_quantity,
            forms.read_form,
        ):
            assert function(text) == function(text) == function.__wrapped__(text), (function.__name__, text)
