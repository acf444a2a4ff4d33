r"""``math_expr`` and ``geo3k``: the answer in ``<answer>`` or in the last ``\\boxed{…}``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nemorl.types import Prompt
from nemorl_math_env import Geo3kConfig, MathExpressionConfig
from nemorl_math_env.elements import Geo3k, MathExpression, has_form, last_box


def prompt(answer: str) -> Prompt:
    return Prompt(0, "?", (1,), answer=answer)


@pytest.fixture(scope="module")
def math_expr() -> Iterator[MathExpression]:
    environment = MathExpression(MathExpressionConfig(workers=1))
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def geo3k() -> Iterator[Geo3k]:
    environment = Geo3k(Geo3kConfig(workers=1))
    yield environment
    environment.close()


@pytest.mark.parametrize(
    ("response", "truth", "is_right"),
    [
        ("<answer>1/2</answer>", "0.5", True),
        (r"<answer> $\frac{1}{2}$ </answer>", "0.5", True),
        (r"<answer>\boxed{0.50}</answer> by the way, 7.", "1/2", True),
        ("<answer>2 + x</answer>", "x + 2", True),
        ("0.5", "0.5", False),
        (r"\boxed{0.5}", "0.5", False),
        ("<answer>0.5", "0.5", False),
        ("<answer>5</answer>", "0.5", False),
    ],
)
def test_the_element_is_the_answer(math_expr: MathExpression, response: str, truth: str, is_right: bool) -> None:
    assert math_expr.score(prompt(truth), response).reward == float(is_right)


@pytest.mark.parametrize(
    ("response", "reward", "answer", "form"),
    [
        (r"<think>30 + 60</think> \boxed{90}", 1.0, 1.0, 1.0),
        (r"</think> \boxed{45}", 0.1, 0.0, 1.0),
        (r"\boxed{90}", 0.9, 1.0, 0.0),
        (r"\boxed{90} </think>", 0.9, 1.0, 0.0),
        (r"</think> \boxed{90} no, \boxed{45}", 0.1, 0.0, 1.0),
        (r"</think> \boxed{45} no, \boxed{90^\circ}", 1.0, 1.0, 1.0),
        (r"</think> \boxed{90", 0.0, 0.0, 0.0),
        ("</think> 90", 0.0, 0.0, 0.0),
    ],
)
def test_the_last_box_is_the_answer_and_the_form_earns_a_tenth(
    geo3k: Geo3k, response: str, reward: float, answer: float, form: float
) -> None:
    score = geo3k.score(prompt("90"), response)
    assert score.reward == pytest.approx(reward)
    assert (score.components, score.correct) == ({"answer": answer, "format": form}, answer == 1.0)


def test_the_weight_of_the_form_can_be_chosen() -> None:
    environment = Geo3k(Geo3kConfig(format_weight=0.25))
    assert environment.score(prompt("90"), r"\boxed{90}").reward == 0.75
    assert environment.score(prompt("90"), r"</think>\boxed{4}").reward == 0.25


def test_the_braces_of_a_box_are_counted() -> None:
    assert last_box(r"\boxed{a}, \boxed{\frac{1}{2}} }") == r"\frac{1}{2}"
    assert last_box(r"\boxed{a} and \boxed{b") is None
    assert last_box("none") is None


def test_an_endless_response_is_read_at_once() -> None:
    hostile = ("</think>" * 20_000, "</think>" + "\\boxed{" * 20_000, "\\boxed{" + "{" * 100_000, "<answer>" * 20_000)
    for text in hostile:
        assert last_box(text) is None
        assert not has_form(text)
