"""``exact_alnum``, ``bbox_giou``, ``format``, ``math_expr`` and ``geo3k`` equal NeMo RL's reward functions on
10,000 drawn answers each (``record_peer_rewards.py``); where they are meant to differ, the difference is counted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from drawn_answers import COUNT, Drawn, boxed_numbers, boxes, numbers, words
from nemorl.config import load_config
from nemorl.contracts import Environment
from nemorl.contracts.environment import as_step
from nemorl.types import Prompt, Score
from nemorl_rl.chat.answers import element
from record_peer_rewards import SCALE, recorded

CLEVR_FORMAT = {"name": "format", "tags": ["think", "answer"], "credit": "elements"}
CLEVR_FORMAT |= {"shares": {"think": 0.25, "answer": 0.75}}
CLEVR = {
    "name": "weighted",
    "parts": {
        "format": {"environment": CLEVR_FORMAT, "weight": 0.2},
        "exact_alnum": {"environment": "exact_alnum", "weight": 0.8},
    },
    "lead": "exact_alnum",
}


def built(environment: object) -> Environment:
    """An environment by its name in a config, as a run has it."""
    config = load_config({"algorithm": "grpo", "model": "org/model", "data": "arithmetic", "environment": environment})
    found: Environment = config.environment.build()
    return found


def scored(environment: object, draw: Callable[[int], Drawn], count: int) -> list[Score]:
    """What ours says of the drawn answers."""
    ours, scores = built(environment), []
    for seed in range(count):
        truth, response = draw(seed)
        step = as_step(ours.start(Prompt(seed, "?", (1,), answer=truth)).step(response))
        scores.append(step.score)
    ours.close()
    return scores


def differences(case: str, environment: object, draw: Callable[[int], Drawn]) -> dict[int, tuple[float, float]]:
    """Number of an answer -> our reward and theirs, where these are not the same."""
    theirs = recorded()[case]
    assert len(theirs) == COUNT
    assert len({round(reward, 3) for reward in theirs}) > 1
    ours = [score.reward for score in scored(environment, draw, COUNT)]
    pairs = enumerate(zip(ours, theirs, strict=True))
    return {number: pair for number, pair in pairs if abs(pair[0] - pair[1]) > SCALE}


@pytest.mark.parametrize(
    ("case", "environment", "draw"),
    [
        ("exact_alnum", "exact_alnum", words),
        ("math_expr", "math_expr", numbers),
        ("geo3k", "geo3k", boxed_numbers),
    ],
)
def test_rewards_are_those_of_nemo_rl(case: str, environment: str, draw: Callable[[int], Drawn]) -> None:
    assert differences(case, environment, draw) == {}


def is_disordered(response: str) -> bool:
    """Four numbers, but not of a box: a corner is where the other should be, or nowhere."""
    try:
        numbers = [float(part) for part in (element(response, "answer") or "").strip("\n[]").split(",")]
    except ValueError:
        return False
    return len(numbers) == 4 and not (numbers[0] <= numbers[2] < math.inf and numbers[1] <= numbers[3] < math.inf)


@pytest.mark.parametrize(("case", "options"), [("bbox_giou", {}), ("bbox_giou, plain from 0.5", {"plain_from": 0.5})])
def test_boxes_earn_what_nemo_rl_pays_but_for_those_that_are_none(case: str, options: dict[str, float]) -> None:
    found = differences(case, {"name": "bbox_giou", **options}, boxes)
    disordered = {number for number in range(COUNT) if is_disordered(boxes(number)[1])}
    assert set(found) <= disordered
    assert 900 < len(found) < 1000
    assert {ours for ours, _ in found.values()} == {0.0}
    assert max(theirs for _, theirs in found.values()) > 15  # of a reward that cannot be above 1 for a box


def test_the_form_earns_what_nemo_rl_pays_but_for_elements_that_are_empty_or_there_twice() -> None:
    found = differences("format", CLEVR_FORMAT, words)
    for number in range(COUNT):
        response = words(number)[1]
        inside = [element(response, tag) for tag in ("think", "answer")]
        is_plain = all(text is None or text.strip() for text in inside)
        is_plain = is_plain and all(response.count(f"{tag}>") <= 2 for tag in ("think", "answer"))
        assert not (is_plain and number in found), response
    assert all(ours < theirs for ours, theirs in found.values())
    assert len(found) < COUNT / 3


def test_weighted_parts_earn_what_nemo_rl_pays_for_a_list_of_reward_functions() -> None:
    of_form = differences("format", CLEVR_FORMAT, words)
    of_both = differences("format 0.2 and exact_alnum 0.8", CLEVR, words)
    assert of_both.keys() == of_form.keys()
    # The whole difference is that of the form, which weighs 0.2.
    for number, (ours, theirs) in of_both.items():
        form, their_form = of_form[number]
        assert theirs - ours == pytest.approx(0.2 * (their_form - form), abs=2 * SCALE)
