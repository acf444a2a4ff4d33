"""The calculator: what it computes, what it refuses, and episodes that call it."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.errors import DataError
from nemorl.types import Prompt, Step
from nemorl_tasks.environments import CalculationsConfig, CalculatorConfig
from nemorl_tasks.environments.calculator import Calculator, final_number, tool_call
from nemorl_tasks.environments.expressions import ExpressionError, evaluate, show
from pydantic import ValidationError
from recorded_messages import Raises


def talk(*responses: str, answer: str = "84", **options: Any) -> list[Step]:
    episode = Calculator(CalculatorConfig(**options)).start(Prompt(0, "12*7?", (1,), answer=answer))
    return [episode.step(response) for response in responses]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        ("1,000 + 1", "1001"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("-(2 - 5) ** 3", "27"),
        ("2^10 % 1000", "24"),
        ("7 // 2 − 1", "2"),
        ("2 × 3 ÷ 4", "1.5"),
        ("2**-2", "0.25"),
        ("10**80 + 0", "1e+80"),
    ],
)
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert show(evaluate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1/0",
        "0**-1",
        "9**9**9",
        "(9**999) * (9**999) * (9**999)",
        "1e999",
        "2**0.5",
        "__import__('os').getcwd()",
        "abs(3)",
        "[1] * 99",
        "'a' * 99",
        "True + 1",
        "1 if 1 else 2",
        "x := 1",
        "1 +",
        "",
        "\x00",
        "(" * 150,
        "-" * 199 + "1" + "1",
        "1" * 300,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_anything_else_is_an_error_with_a_reason(expression: str, raises: Raises) -> None:
    with raises(ExpressionError):
        evaluate(expression)


def test_a_call_is_answered_and_the_final_answer_graded() -> None:
    call, final = talk("Let me see: <tool>12*7</tool>", "Answer: 84")
    assert (call.observation, call.done, call.score.reward) == ("\n<result>84</result>\n", False, 0.0)
    assert (final.done, final.score.reward, final.score.correct) == (True, 1.0, True)
    assert call.score.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
    assert final.score.metrics == {"tool_calls": 0.0, "tool_errors": 0.0}


@pytest.mark.parametrize(
    ("response", "expression"),
    [
        ("<tool> 1+1 </tool>\n", " 1+1 "),
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>', "1+1"),
        ('<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"1+1\\"}"}</tool_call>', "1+1"),
        ("<tool_call>1+1</tool_call>", ""),
        ("<tool_call>[]</tool_call>", ""),
        ("<tool>1+1</tool><result>2</result> Answer: 2", None),
        ("<tool>1+1", None),
        ("2", None),
    ],
)
def test_a_call_is_what_the_response_ends_with(response: str, expression: str | None) -> None:
    assert tool_call(response) == expression


def test_a_broken_call_is_told_and_counted() -> None:
    first, second = talk("<tool>12*</tool>", "<tool_call>{</tool_call>")
    assert first.observation == "\n<result>error: not an arithmetic expression</result>\n"
    assert (first.score.metrics["tool_errors"], second.score.metrics["tool_errors"]) == (1.0, 1.0)
    assert not first.done


def test_one_call_too_many_ends_the_episode() -> None:
    steps = talk(*["<tool>1</tool>"] * 3, max_calls=2)
    assert [step.done for step in steps] == [False, False, True]
    assert (steps[2].score.reward, steps[2].score.correct) == (0.0, False)


def test_the_tool_can_be_required() -> None:
    assert talk("84", require_tool=True)[0].score.reward == 0.0
    assert talk("<tool>1/0</tool>", "84", require_tool=True)[1].score.reward == 0.0
    assert talk("<tool>12*7</tool>", "84", require_tool=True)[1].score.reward == 1.0


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("12 times 7 is 84", 84),
        ("Answer: 84, I checked it 3 times", 84),
        ("the answer is -1,200", -1200),
        ("<answer>84</answer> and 5", 84),
        (r"\boxed{84}", 84),
        ("$84", 84),
        ("168/2", 84),
        ("no idea", None),
        ("1/0", None),
    ],
)
def test_the_marked_number_counts_else_the_last(response: str, number: int | None) -> None:
    assert final_number(response) == number


@pytest.mark.parametrize("answer", ["a lot", ""])
def test_a_row_whose_answer_is_no_number_is_an_error(answer: str, raises: Raises) -> None:
    with raises(DataError):
        talk(answer=answer)


def test_generated_answers_are_the_values_of_their_expressions() -> None:
    rows = CalculationsConfig(num_train=30, num_validation=10, operands=4).build("train")
    assert rows is not None
    assert [row["answer"] for row in rows] == [str(eval(row["expression"])) for row in rows]
    assert all(row["expression"] in row["prompt"][0]["content"] for row in rows)


def test_held_out_calculations_do_not_depend_on_the_size_of_the_training_set() -> None:
    small, large = (CalculationsConfig(num_train=count).build("validation") for count in (20, 200))
    assert small == large
    assert CalculationsConfig(num_validation=0).build("validation") is None
    assert CalculationsConfig().build("test") is None


def test_asking_for_more_expressions_than_half_of_all_is_a_config_error(raises: Raises) -> None:
    # Two numbers of 1 to 9 and one operation: 81 expressions.
    with raises(ValidationError, 81, path="num_train"):
        CalculationsConfig(operands=2, max_digits=1, operations=("+",), num_train=40, num_validation=1)
