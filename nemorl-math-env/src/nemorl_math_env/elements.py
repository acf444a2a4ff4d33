r"""The ``math_expr`` and ``geo3k`` environments: answers that stand where the prompt asks for them, in
``<answer>…</answer>`` or in the last ``\boxed{…}``. Other numbers that a response may name are not looked at.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nemorl.types import Prompt, Score
from nemorl_rl.chat.answers import element

from nemorl_math_env.answers import MAX_ANSWER_CHARS, final_answer, is_number
from nemorl_math_env.environment import AnswerGrader

if TYPE_CHECKING:
    from nemorl_math_env.config import Geo3kConfig, MathExpressionConfig

BOX = "\\boxed{"


class MathExpression(AnswerGrader):
    """Takes what an element holds for the answer."""

    name = "math_expr"

    def __init__(self, config: MathExpressionConfig) -> None:
        super().__init__(config)
        self._tag = config.tag

    def _given(self, truth: str, response: str) -> str | None:
        inside = element(response, self._tag)
        return None if inside is None else _boxed(last_box(inside) or inside, truth)


class Geo3k(AnswerGrader):
    """Takes the last box for the answer, and rewards the form as well."""

    name = "geo3k"

    def __init__(self, config: Geo3kConfig) -> None:
        super().__init__(config)
        self._format_weight = config.format_weight

    def _given(self, truth: str, response: str) -> str | None:
        inside = last_box(response)
        return None if inside is None else _boxed(inside, truth)

    def score(self, prompt: Prompt, response: str) -> Score:
        graded, form = super().score(prompt, response), float(has_form(response))
        reward = (1 - self._format_weight) * graded.reward + self._format_weight * form
        return replace(graded, reward=reward, components={"answer": graded.reward, "format": form})


def _boxed(text: str, truth: str) -> str | None:
    return final_answer(f"{BOX}{text.strip()[:MAX_ANSWER_CHARS]}}}", require_marker=True, numeric=is_number(truth))


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}``, braces counted; ``None`` without one, or where it is not closed.

    Example:
        >>> last_box("first \\boxed{1}, then \\boxed{\\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    start = text.rfind(BOX)
    depth, begin = 1, start + len(BOX)
    for position in range(begin, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def has_form(response: str) -> bool:
    r"""A ``</think>``, and after it a ``\boxed{`` with a brace that may close it."""
    box = response.find(BOX, response.find("</think>")) if "</think>" in response else -1
    return box >= 0 and "}" in response[box + len(BOX) :]
