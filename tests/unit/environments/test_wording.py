"""One letter or number is paid for where it stands for itself: pairs of responses and verdicts."""

from __future__ import annotations

import pytest
from nemorl.types import Prompt
from nemorl_tasks.environments import MultipleChoiceConfig
from nemorl_tasks.environments.calculator import final_number
from nemorl_tasks.environments.multiple_choice import MultipleChoice
from nemorl_tasks.environments.retriever.environment import final_answer

LETTER_RIGHT = [
    "Answer: B", "Answer: B because A is wrong", "Answer: B, not A", "Answer: B. A and C are wrong.", "**Answer: B**",
    "Answer: A\nWait, I was wrong.\nAnswer: B", "It cannot be A.\nAnswer: B", "Answer: (B) Paris", r"Answer: \boxed{B}",
    "Answer: B (A is out of the question)", "We rule out A, C and D. Answer: B", "Antwort: B, weil A falsch ist",
    "答案：B",
    "Neither A nor C fits. Answer: B", "Answer: B\n\nConfidence: 80 or 90 %", "Answer: B, a city in France",
]  # fmt: skip
LETTER_WRONG = [
    "Answer: B, possibly C", "Answer: B?", "Answer: B or C", "Answer: A or B", "Answer: B and C", "Answer: B/C",
    "Answer: B, C", "Answer: A, B",
    "Answer: B, C or D",
    "Answer: {B, C}", "Answer: B | C", "Answer: B & D", "Answer: B is wrong", "Answer: B? No, C.",
    "Answer: B is incorrect",
    "Answer: B is not right", "Answer: A\nAnswer: C\nAnswer: D\nAnswer: B", "Antwort: B oder C", "Réponse: B ou C",
    "Respuesta: B o C", "答案：B或C", r"\boxed{B} or \boxed{C}", r"The answer is not \boxed{B}", r"not \boxed{B}",
    "Answer: C or B",
    "Answer: **B** or **C**", "Answer: (B) or (D)", "Answer: B+C", "Answer: B to D",
    "Answer:",
]  # fmt: skip
NUMBER_RIGHT = [
    "Answer: 42", "The answer is 42.", "12 * 3 + 6 = 42", "<answer>42</answer>", r"\boxed{42}", "Answer: $42",
    "Answer: 42.0",
    "It is not 41. The answer is 42.", "**Answer: 42**", "Answer: 42 apples", "So we get 42", "Answer: 84/2",
    "Answer: 42, not 41",
    "First 12*7=84, then 84/2 = 42", "answer = 42", "I add 40 and 2 and get 42.", "42",
]  # fmt: skip
NUMBER_WRONG = [
    "Answer: 42 or so", "no idea, 42?", "one of 41, 42", "The answer is not 42", "It isn't 42", "Answer: 42 or 43",
    "Answer: 41 or 42", "Answer: 42%", "Answer: 42^2",
    "Answer: 42e5",
    "Answer: 42 million", "half of 42", "The answer is more than 42", "between 40 and 42", "about 42", "at least 42",
    "42 * 3",
    "Answer: 42 is wrong", "Answer: 4,2", "Answer: 42.5", "Answer: 421", "Answer: x42", "Answer: 42 thousand", "√42",
    "<42",
    "Answer: 42/3", "never 42", "either 41 or 42", "Answer: 42 and 43", "Answer: 42?  no, 43", "Answer: 42 percent",
    "from 1 to 42",
    r"Answer: 42\times 3", "twice 42", "Answer: 42-7", "v1.42", "",
]  # fmt: skip


def given(response: str) -> str | None:
    prompt = Prompt(0, "Which?", (1,), answer="B", row={"letters": "ABCD"})
    return MultipleChoice(MultipleChoiceConfig()).score(prompt, response).answer


@pytest.mark.parametrize("response", LETTER_RIGHT)
def test_a_letter_that_stands_for_itself_is_the_answer(response: str) -> None:
    assert given(response) == "B"


@pytest.mark.parametrize("response", LETTER_WRONG)
def test_a_letter_that_is_denied_or_one_of_several_is_none(response: str) -> None:
    assert given(response) is None


@pytest.mark.parametrize("response", NUMBER_RIGHT)
def test_a_number_that_stands_for_itself_is_the_answer(response: str) -> None:
    assert final_number(response) == 42


@pytest.mark.parametrize("response", NUMBER_WRONG)
def test_a_number_that_is_denied_scaled_or_one_of_several_is_not(response: str) -> None:
    assert final_number(response) != 42


@pytest.mark.parametrize(
    "text", ["Answer: ", "B or ", "42 ", "not ", "1,", " and ", "\\boxed{", "*_$({[", "Answer: B "]
)
def test_long_responses_are_read_in_linear_time(text: str) -> None:
    """A million characters: an expression that backtracks never ends."""
    many = text * (1_000_000 // len(text))
    given(many)
    final_number(many)


def test_a_search_that_tries_out_answers_gives_none() -> None:
    assert final_answer("<answer>Bonn</answer> no: <answer>Berlin</answer>") == "Berlin"
    assert final_answer("<answer>Bonn</answer><answer>Paris</answer><answer>Berlin</answer>") == ""
    assert final_answer("Berlin") == "Berlin"
