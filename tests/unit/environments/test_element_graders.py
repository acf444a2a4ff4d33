"""``exact_alnum`` and ``bbox_giou``: what an element of the response holds."""

from __future__ import annotations

import pytest
from nemorl.config import load_config
from nemorl.errors import ConfigError, DataError
from nemorl.types import Prompt
from nemorl_tasks.environments import BboxGiouConfig, ExactAlnumConfig
from nemorl_tasks.environments.elements import BboxGiou, ExactAlnum, alphanumeric, box_in, overlap
from recorded_messages import Raises


def prompt(answer: str | None) -> Prompt:
    return Prompt(0, "?", (1,), answer=answer)


@pytest.mark.parametrize(
    ("response", "truth", "is_right", "answer"),
    [
        ("<answer>yes</answer>", "yes", True, "yes"),
        ("<think>no</think>\n<answer> Yes. </answer>", "yes", True, "yes"),
        ("<answer>São-Paulo</answer>", "sao paulo", False, "sãopaulo"),
        ("<answer>-1.5</answer>", "15", True, "15"),  # signs and points do not count, as in NeMo RL
        ("yes", "yes", False, None),
        ("<answer>yes", "yes", False, None),
        ("</answer>yes<answer>", "yes", False, None),
        ("<answer>yes</answer> or <answer>no</answer>", "yes", False, "yesansweroranswerno"),
        ("<answer> !? </answer>", "yes", False, None),
    ],
)
def test_letters_and_digits_are_compared(response: str, truth: str, is_right: bool, answer: str | None) -> None:
    score = ExactAlnum(ExactAlnumConfig()).score(prompt(truth), response)
    assert (score.reward, score.correct, score.answer) == (float(is_right), is_right, answer)


def test_another_element_may_hold_the_answer() -> None:
    assert ExactAlnum(ExactAlnumConfig(tag="final")).score(prompt("7"), "<answer>8</answer><final>7</final>").correct
    with pytest.raises(ConfigError):
        load_config({"algorithm": "grpo", "model": "o/m", "environment": {"name": "exact_alnum", "tag": "a>b"}})


def test_letters_of_every_script_count() -> None:
    assert alphanumeric("北京, 2008!") == "北京2008"


def test_overlap_by_hand() -> None:
    # I = 1, U = 4 + 4 - 1 = 7, C = 9: 1/7 - 2/9 = -5/63.
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(-5 / 63)
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3), plain_from=0.1) == pytest.approx(1 / 7)
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3), plain_from=0.2) == pytest.approx(-5 / 63)
    # I = 0, U = 2, C = 1 * 100: -98/100. Farther is worse.
    assert overlap((0, 0, 1, 1), (99, 0, 100, 1)) == pytest.approx(-0.98)
    # One box in the other: C = U = 16, so that 4/16 is left.
    assert overlap((0, 0, 4, 4), (1, 1, 3, 3)) == pytest.approx(0.25)


def test_a_box_has_its_corners_in_order() -> None:
    assert box_in("[1, 2.5, 30, 4e1]") == (1.0, 2.5, 30.0, 40.0)
    assert box_in("1,2,3,4") == (1.0, 2.0, 3.0, 4.0)
    for text in ("", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[a, b, c, d]", "[3, 2, 1, 4]", "[1, 4, 3, 2]", "[1, 2, nan, 4]"):
        assert box_in(text) is None, text


@pytest.mark.parametrize(
    ("said", "reward", "is_right"),
    [
        ("<answer>[100, 100, 200, 200]</answer>", 1.0, True),
        # I = 100 * 60, U = 10,000, C = U: 0.6.
        ("<answer>[100, 100, 200, 160]</answer>", 0.6, True),
        ("<answer>[100, 100, 200, 150]</answer>", 0.5, False),
        ("[100, 100, 200, 200]", 0.0, False),
        ("<answer>the dog</answer>", 0.0, False),
        # Both corners in the wrong order: an "area" of 10^6 that meets nothing would earn 10^6 / 10^4 = 100.
        ("<answer>[1000, 1000, 0, 0]</answer>", 0.0, False),
    ],
)
def test_boxes_are_compared(said: str, reward: float, is_right: bool) -> None:
    score = BboxGiou(BboxGiouConfig()).score(prompt("[100, 100, 200, 200]"), said)
    assert (score.reward, score.correct) == (pytest.approx(reward), is_right)


@pytest.mark.parametrize("answer", ["the dog", "[200, 100, 100, 200]"])
def test_a_row_without_a_box_is_an_error(answer: str, raises: Raises) -> None:
    with raises(DataError, "bbox_giou", answer):
        BboxGiou(BboxGiouConfig()).score(prompt(answer), "<answer>[1, 2, 3, 4]</answer>")
