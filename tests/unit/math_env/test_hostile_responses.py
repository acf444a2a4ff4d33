"""What a policy may write to be slow or to crash its grader: pieces of everything that some rule looks at, repeated."""

from __future__ import annotations

import re

import pytest
import regex
from answer_pairs import whole_responses
from nemorl_math_env import answers, boxes, context, markdown
from nemorl_math_env.answers import canonical, decide, final_answer

PIECES = [
    *"*_`[<>#|~&${}()=-/^\"'\\.,;!?:1aé→✅\u200b\n\t ",
    *("- ", "# ", "> ", "1. ", "* a\n", "- 1\n", "![", "](", "[a](", "`a", "**a ", "a**b", "**1**", "~~1", "| 1 | "),
    *("|a\n|-\n", "| a |\n", "\n\n", "<b>", "<del>", "<!--", "</", "<a b=", "<answer>", "&nbsp;"),
    *("&#xE000;", "&#57349;", "####", "#### "),
    *("$$", "$1 ", "\\$", "\\(", "\\[", "\\boxed{", "\\boxed{1} ", "\\boxed{1} or ", "$\\boxed{1}$ or ", "}{", "{1} "),
    *("\\begin{a}", "\\begin{align}", "\\\\", "\\text{", "\\frac{", "1+", "(1+", "(1+1) ", "1,", "1,000,", "1 ", "1="),
    *(
        "not ",
        "is not ",
        "don't ",
        "the ",
        "if ",
        "no, ",
        "wait ",
        "times ",
        "between 1 and ",
        "5 a ",
        "Answer: ",
        "; 4",
    ),
]
ENDINGS = ["", " 42", " Answer: 42", "\n\n**42**", r" \boxed{42}, ", "\nThe answer is **42**"]
REACH = {answers: 20_000, boxes: boxes._REACH, context: answers.CONTEXT_CHARS, markdown: markdown.MAX_CHARS}
"""Characters that a module's patterns are given at most, or enough of them to see a square."""


@pytest.mark.slow
@pytest.mark.parametrize("module", REACH, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_pattern_takes_more_than_linear_work(module):
    patterns = {name: value for name, value in vars(module).items() if isinstance(value, re.Pattern)}
    assert patterns
    slow = set()
    for name, pattern in patterns.items():
        same = regex.compile(pattern.pattern, pattern.flags & ~re.UNICODE)
        for piece in PIECES:
            text = (piece * REACH[module])[: REACH[module]]
            try:
                sum(1 for _ in same.finditer(text, timeout=20))  # a busy machine takes linear work for two seconds
            except TimeoutError:
                slow.add((name, piece))
    assert slow == set()


def test_no_text_raises_or_is_paid_for_its_noise():
    for piece in PIECES:
        for ending in ENDINGS:
            for text in (piece * (1200 // len(piece)) + ending, ending + piece * (1200 // len(piece))):
                given = final_answer(text, numeric=True) or ""
                decide("42", given)
                assert decide("43", given) is not True
                canonical(given, truth="42")


def test_a_reference_of_thousands_of_digits_is_compared_as_text():
    assert decide("1" * 5000, "5") is False
    assert decide("1" * 5000, "1" * 5000) is True


def test_bold_words_are_read_without_the_parser_as_with_it(monkeypatch):
    texts = [pair.response for name in ("", "_later", "_last") for pair in whole_responses(f"response_pairs{name}.txt")]
    texts += [
        f"a **{inside}**{after}" for inside in ("42", "x = 4", "4 apples:", "a.") for after in ("", ".", " b", ", c")
    ]
    quick = [markdown.plain(text, ("answer:",)).split() for text in texts]
    monkeypatch.setattr(markdown, "_BOLD", re.compile(r"(?!)()"))
    assert [markdown.plain(text, ("answer:",)).split() for text in texts] == quick
