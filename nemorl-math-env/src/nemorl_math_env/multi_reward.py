"""The ``multi_reward_math`` environment: three named rewards for one answer, the task of the GDPO paper
(arXiv:2601.05242) as NeMo RL has it (``math_multi_reward``)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_rl.rollouts.prompts import required_answer

if TYPE_CHECKING:
    from nemorl_math_env.config import MultiRewardMathConfig

FORM = re.compile(r"<think>.*</think>\n<answer>.*</answer>\n?", re.DOTALL)


class MultiRewardMath(Environment):
    """Rewards the answer, its being an integer, and the form of the response, each by itself."""

    name = "multi_reward_math"
    needs_columns = frozenset({"answer"})
    has_side_effects = False

    def __init__(self, config: MultiRewardMathConfig) -> None:
        self._config = config

    def score(self, prompt: Prompt, response: str) -> Score:
        given = answer_in(response)
        is_right = given == required_answer(prompt, self.name)
        parts = {
            "correctness": float(is_right),
            "integer": float(given.isascii() and given.isdigit()),
            "format": float(has_form(response)),
        }
        return Score(sum(parts.values()), components=parts, correct=is_right, answer=given or None)


def answer_in(response: str) -> str:
    """The text of the last ``<answer>`` element; of a response without one, all of it."""
    return response.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def has_form(response: str) -> bool:
    """The whole response is a ``<think>`` element, a line end and the only ``<answer>`` element."""
    once = response.count("<answer>") == 1 and response.count("</answer>") == 1
    return once and FORM.fullmatch(response) is not None
