r"""The ``dapo_math`` environment: DAPO's verification (arXiv:2503.14476) of answers written as ``Answer: …``.

An answer is right when its text is that of the reference, both in the normal form of Minerva (arXiv:2206.14858,
appendix D.1), which lm-evaluation-harness, verl and NeMo RL use as well. Nothing is evaluated: ``1/2`` is not ``0.5``.
A box alone is no answer, as in DAPO and NeMo RL; verl 0.9 takes one where the ``Answer:`` is wrong.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_rl.rollouts.prompts import required_answer

if TYPE_CHECKING:
    from nemorl_math_env.config import DapoMathConfig

ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
"""Spellings that become one, in this order."""
REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
"""Units and decoration, taken out in this order."""
_BETWEEN_DOLLARS = re.compile(r".*?\$(.*?)\$.*")
_WRAPPED = tuple(re.compile(rf"\\{command}\{{(.*?)\}}") for command in ("text", "textbf", "overline"))
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


class DapoMath(Environment):
    """Compares the last ``Answer:`` of a response with the row's answer."""

    name = "dapo_math"
    needs_columns = frozenset({"answer"})
    has_side_effects = False

    def __init__(self, config: DapoMathConfig) -> None:
        self._config = config

    def score(self, prompt: Prompt, response: str) -> Score:
        truth = normal_form(required_answer(prompt, self.name))
        given = self._given(response)
        is_right = given == truth
        reward = 1.0 if is_right else self._config.wrong_reward
        return Score(reward, correct=is_right, answer=given, metrics={"unparsable": float(given is None)})

    def _given(self, response: str) -> str | None:
        found = ANSWER.findall(response[-self._config.last_chars :])
        return normal_form(found[-1]) if found else None


def normal_form(answer: str) -> str:
    r"""The spelling in which answers are compared.

    Example:
        >>> normal_form("x = 5,000 dollars"), normal_form("$\\frac12$"), normal_form("\\boxed{\\sqrt2}")
        ('5000', '\\frac{1}{2}', '\\sqrt{2}')
    """
    text = answer.rpartition("=")[2]
    for before, after in REPLACED:
        text = text.replace(before, after)
    for decoration in REMOVED:
        text = text.replace(decoration, "")
    text = _BETWEEN_DOLLARS.sub(r"$\1$", text)
    for pattern in (*_WRAPPED, _BOXED):
        text = pattern.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
