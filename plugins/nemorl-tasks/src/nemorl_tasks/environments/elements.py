"""Graders of what ``<answer>…</answer>`` holds: letters and digits, or a box in an image."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.types import Prompt, Score
from nemorl_rl.chat.answers import element
from nemorl_rl.rollouts.prompts import required_answer

if TYPE_CHECKING:
    from nemorl_tasks.environments.config import BboxGiouConfig, ExactAlnumConfig

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2: the upper left and the lower right corner, y pointing down."""
SMALLEST_AREA = 1e-3
"""Areas below count as this one, so that a quotient of two has a value. Coordinates are thousandths or pixels."""
OVERLAPS = 0.5
"""Above it a box counts as right."""


class ExactAlnum(Environment):
    """Compares letters and digits."""

    name = "exact_alnum"
    needs_columns = frozenset({"answer"})
    has_side_effects = False

    def __init__(self, config: ExactAlnumConfig) -> None:
        self._config = config

    def score(self, prompt: Prompt, response: str) -> Score:
        inside = element(response, self._config.tag)
        given = None if inside is None else alphanumeric(inside)
        is_right = given == alphanumeric(required_answer(prompt, self.name))
        return Score(float(is_right), correct=is_right, answer=given or None)


def alphanumeric(text: str) -> str:
    """Its letters and digits, of any script, in lower case.

    Example:
        >>> alphanumeric(" Yes, 3.5! ")
        'yes35'
    """
    return "".join(filter(str.isalnum, text)).lower()


class BboxGiou(Environment):
    """Compares boxes."""

    name = "bbox_giou"
    needs_columns = frozenset({"answer"})
    has_side_effects = False

    def __init__(self, config: BboxGiouConfig) -> None:
        self._config = config

    def score(self, prompt: Prompt, response: str) -> Score:
        wanted = box_in(required_answer(prompt, self.name))
        if wanted is None:
            raise DataError(
                f"the {self.name} environment has no box to compare with: {prompt.answer!r:.80}",
                fix='give rows an `answer` of the form "[x1, y1, x2, y2]" with x1 <= x2 and y1 <= y2',
            )
        given = box_in(element(response, self._config.tag) or "")
        reward = 0.0 if given is None else overlap(wanted, given, self._config.plain_from)
        return Score(reward, correct=reward > OVERLAPS)


def box_in(text: str) -> Box | None:
    """The four numbers of ``[x1, y1, x2, y2]``, brackets or not; ``None`` for anything else.

    A box whose corners are in another order is none. Its area would count with the wrong sign, or, with both orders
    wrong, in full although it meets nothing: NeMo RL's ``bbox_giou_reward`` pays 100 for ``[1000, 1000, 0, 0]`` where
    ``[100, 100, 200, 200]`` is asked for. So are numbers that are not finite.
    """
    try:
        x1, y1, x2, y2 = (float(part) for part in text.replace("[", "").replace("]", "").split(","))
    except ValueError:
        return None
    is_box = all(map(math.isfinite, (x1, y1, x2, y2))) and x1 <= x2 and y1 <= y2
    return (x1, y1, x2, y2) if is_box else None


def overlap(one: Box, other: Box, plain_from: float | None = None) -> float:
    """The generalised intersection over union (arXiv:1902.09630).

    GIoU = I / U - (C - U) / C      C: area of the smallest box around both

    Differs from the paper: no area is below ``SMALLEST_AREA``.

    Args:
        one: A box.
        other: Another.
        plain_from: From this I / U on, that is the result.

    Example:
        >>> overlap((0, 0, 2, 2), (1, 0, 3, 2))  # I = 2, U = 6, C = 6
        0.3333333333333333
        >>> overlap((0, 0, 1, 1), (3, 0, 4, 1))  # I = 0, U = 2, C = 4
        -0.5
    """
    left, top, right, bottom = (
        max(one[0], other[0]),
        max(one[1], other[1]),
        min(one[2], other[2]),
        min(one[3], other[3]),
    )
    intersection = max(0.0, right - left) * max(0.0, bottom - top)
    union = max(SMALLEST_AREA, _area(one) + _area(other) - intersection)
    share = intersection / union
    if plain_from is not None and share >= plain_from:
        return share
    around = (min(one[0], other[0]), min(one[1], other[1]), max(one[2], other[2]), max(one[3], other[3]))
    hull = max(SMALLEST_AREA, _area(around))
    return share - (hull - union) / hull


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
