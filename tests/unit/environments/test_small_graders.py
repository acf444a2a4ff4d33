"""``exact_match``, ``format`` and ``repetition``."""

from __future__ import annotations

from typing import Literal

import pytest
from nemorl.errors import DataError
from nemorl.types import Prompt, Score
from nemorl_tasks.environments import CodeJaccardConfig, ExactMatchConfig, FormatConfig, RepetitionConfig
from nemorl_tasks.environments.graders import CodeJaccard, ExactMatch, Format, Repetition
from recorded_messages import Raises

PARIS = Prompt(0, "Capital of France?", (1,), answer="Paris")


@pytest.mark.parametrize(
    ("options", "response", "is_right"),
    [
        ({}, " Paris\n", True),
        ({}, "paris", False),
        ({"ignore_case": True}, "PARIS", True),
        ({}, "It is Paris.", False),
        ({"contains": True}, "It is Paris.", True),
        ({}, "", False),
    ],
)
def test_the_whole_response_is_compared(options: dict[str, bool], response: str, is_right: bool) -> None:
    score = ExactMatch(ExactMatchConfig(**options)).score(PARIS, response)
    assert (score.reward, score.correct) == (float(is_right), is_right)


def test_a_row_without_an_answer_is_an_error(raises: Raises) -> None:
    with raises(DataError, "exact_match"):
        ExactMatch(ExactMatchConfig()).score(Prompt(0, "x", (1,)), "y")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>a < b\n</think>\n\n<answer>b</answer> ", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<think>a<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_come_in_order_once_filled_and_alone(response: str, reward: float) -> None:
    assert Format(FormatConfig(tags=("think", "answer"))).score(PARIS, response) == reward


def test_a_pattern_must_match_all_of_a_response_that_is_not_too_long() -> None:
    grader = Format(FormatConfig(pattern=r"\w+\n.*", max_chars=10))
    assert [
        float(getattr(s := grader.score(PARIS, text), "reward", s))
        for text in ("a\nb\nc", " a\nb", "a", "abc\n" + "x" * 7)
    ] == [1.0, 0.0, 0.0, 0.0]


FORMS = {
    "<think>\na\n</think>\n<answer>\nb\n</answer>": (1.0, 1.0),
    "<think>\na\n</think>\nb": (0.5, 0.25),
    "<think>\na\n\n<answer>\nb\n</answer>": (0.75, 0.75),
    "nothing": (0.0, 0.0),
    "\n<answer>\nb\n</answer>": (0.5, 0.75),
}
"""Responses, what ``tag_count_reward`` of open-r1 pays for them (run at its commit of 2025), and what NeMo RL's
``format_reward`` does (0.25 for a think element, 0.75 for an answer element)."""


def test_partial_credit_is_that_of_open_r1_and_nemo_rl() -> None:
    tags = Format(FormatConfig(tags=("think", "answer"), credit="tags"))
    elements = Format(FormatConfig(tags=("think", "answer"), credit="elements", shares={"think": 0.25, "answer": 0.75}))
    assert {text: (tags.score(PARIS, text), elements.score(PARIS, text)) for text in FORMS} == FORMS


def test_partial_credit_is_not_had_by_repeating_emptying_or_reversing() -> None:
    grader = Format(FormatConfig(tags=("think", "answer"), credit="elements"))
    # Think twice earns nothing for it (NeMo RL pays in full), so only half for the answer is left.
    assert grader.score(PARIS, "<think>a</think><think>a</think><answer>b</answer>") == 0.5
    assert grader.score(PARIS, "<think> </think><answer>b</answer>") == 0.5
    assert grader.score(PARIS, "</think>a<think></answer>b<answer>") == 0.0
    assert grader.score(PARIS, "<answer>b</answer> and <think>a</think>") == 1.0  # partial credit asks for no order


TEXTS = (
    "",
    "one two",
    "one two three",
    "a b c a b c",
    "the cat sat on the mat and the cat sat on the hat",
    "No no no no no no",
    "All of it is new here, word by word",
    "I think I think I think so\nI think I think so",
)


@pytest.mark.parametrize(
    ("run_length", "max_penalty", "rewards"),
    [
        # What get_repetition_penalty_reward of open-r1 (arXiv:2502.03373) returns for TEXTS.
        (3, 1.0, [0.0, 0.0, 0.0, -0.25, -0.2727272727272727, -0.75, 0.0, -0.5]),
        (2, 0.5, [0.0, 0.0, 0.0, -0.2, -0.16666666666666669, -0.4, 0.0, -0.3181818181818182]),
    ],
)
def test_repetition_costs_what_it_costs_in_open_r1(run_length: int, max_penalty: float, rewards: list[float]) -> None:
    grader = Repetition(RepetitionConfig(run_length=run_length, max_penalty=max_penalty))
    assert [float(getattr(s := grader.score(PARIS, text), "reward", s)) for text in TEXTS] == pytest.approx(
        rewards, abs=1e-15
    )


def test_characters_are_counted_where_words_have_no_spaces() -> None:
    grader = Repetition(RepetitionConfig(run_length=2, of="characters"))
    # ab ba ab ba ab: 2 of 5 distinct, and the space does not hide it.
    assert grader.score(PARIS, "aba bab") == pytest.approx(-0.6)


@pytest.mark.parametrize(
    ("answer", "response", "reward", "plain"),
    [
        ("x = a - b", "x = a + b", 4 / 6, 4 / 6),  # {x, =, a, b} of {x, =, a, b, -, +}; equally long
        ("a b c d", "a b", 2 / 4 * 3 / 7, 2 / 4),  # 3 characters of 7
        ("Return A + B", " return a + b\n", 1.0, 1.0),
        ("print('hello')", "goodbye world", 0.0, 0.0),
        ("a", "", 0.0, 0.0),
        ("a b", "a b " * 1000, 3 / 3999, 1.0),  # saying it again does not pay
    ],
)
def test_words_in_common_by_hand(answer: str, response: str, reward: float, plain: float) -> None:
    prompt = Prompt(0, "?", (1,), answer=answer)
    assert CodeJaccard(CodeJaccardConfig()).score(prompt, response) == pytest.approx(reward)
    assert CodeJaccard(CodeJaccardConfig(length_penalty=False)).score(prompt, response) == pytest.approx(plain)


@pytest.mark.parametrize("pattern", [r"<a>(.|\n)*</a>", r"(.|\s)+\d", r"<a>(\n|\n\n)+[xy]"])
def test_a_response_cannot_stall_a_pattern(pattern: str) -> None:
    score = Format(FormatConfig(pattern=pattern)).score(PARIS, "<a>" + "\n" * 60)
    assert score == Score(0.0, metrics={"pattern_timeout": 1.0})


@pytest.mark.parametrize(
    "blank", ["\u200b", "\ufeff", "\x00", "\x1b", "\u2060", "\u3164", "\u2800", "\ufe0f", "\u00ad", "\u0301"]
)
@pytest.mark.parametrize("credit", ["whole", "elements"])
def test_what_cannot_be_seen_fills_no_element(blank: str, credit: Literal["whole", "elements"]) -> None:
    grader = Format(FormatConfig(tags=("answer",), credit=credit))
    assert grader.score(PARIS, f"<answer> {blank}</answer>") == 0.0
    assert grader.score(PARIS, f"<answer>{blank}答</answer>") == 1.0
