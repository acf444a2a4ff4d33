"""``multiple_choice``: the letter that a response ends with."""

from __future__ import annotations

import pytest
from nemorl.errors import DataError
from nemorl.types import Prompt
from nemorl_tasks.environments import MultipleChoiceConfig
from nemorl_tasks.environments.multiple_choice import MultipleChoice
from recorded_messages import Raises


def question(letters: str = "ABCD", answer: str | None = "B") -> Prompt:
    return Prompt(0, "Which?", (1,), answer=answer, row={"letters": letters})


@pytest.mark.parametrize(
    "response",
    [
        "Answer: B",
        "answer: b",
        "It is B.\n\nAnswer: B.",
        "Answer: (B) because",
        "**Answer:** B",
        "**Answer**: **B**",
        r"Answer: $\boxed{\text{B}}$",
        "Answer: A, no, wait.\nAnswer: B",
        r"So it is \boxed{B}.",
        "Antwort: B",
        "答案：B",
        "答案：Ｂ",
        "الإجابة: ب",
        "উত্তর: ব",
        "정답: B",
        "Ìdáhùn: B",
    ],
)
def test_the_letter_that_stands_last_counts(response: str) -> None:
    score = MultipleChoice(MultipleChoiceConfig()).score(question(), response)
    assert (score.reward, score.correct, score.answer) == (1.0, True, "B")


@pytest.mark.parametrize(
    "response", ["", "B", "Answer: C", "Answer: Berlin", "The answer is B", "Answer:\n", "Answer: 2"]
)
def test_anything_else_is_wrong(response: str) -> None:
    score = MultipleChoice(MultipleChoiceConfig()).score(question(), response)
    assert (score.reward, score.correct) == (0.0, False)


def test_a_letter_that_no_option_has_is_no_answer() -> None:
    grader = MultipleChoice(MultipleChoiceConfig())
    assert grader.score(question("ABCD"), "Answer: J").answer is None
    assert grader.score(question("ABCDEFGHIJ", "J"), "Answer: J").correct


def test_other_words_may_lead_to_the_letter() -> None:
    assert not MultipleChoice(MultipleChoiceConfig()).score(question(), "Svar: B").correct
    assert MultipleChoice(MultipleChoiceConfig(answer_words=("Svar",))).score(question(), "Svar: B").correct


def test_a_box_counts_only_if_it_may() -> None:
    assert not MultipleChoice(MultipleChoiceConfig(boxed=False)).score(question(), r"\boxed{B}").correct


def test_a_row_without_an_answer_is_an_error(raises: Raises) -> None:
    with raises(DataError, "multiple_choice"):
        MultipleChoice(MultipleChoiceConfig()).score(question(answer=None), "Answer: B")


def test_a_long_response_that_almost_matches_is_read_in_linear_time() -> None:
    response = ("Answer:" + " " * 1000) * 1000  # a million characters: a regular expression that backtracks never ends
    assert MultipleChoice(MultipleChoiceConfig()).score(question(), response).answer is None
