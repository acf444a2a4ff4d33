"""The grader of multiple-choice questions: which letter a response ends with, in the languages of multilingual MMLU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score
from nemorl_rl.rollouts.prompts import required_answer

from nemorl_tasks.environments.wording import NEAR_CHARS, has_alternative, is_denied

if TYPE_CHECKING:
    from nemorl_tasks.environments.config import MultipleChoiceConfig

ANSWER_WORDS = (
    *("Answer", "Antwort", "Respuesta", "Réponse", "Risposta", "Resposta", "Jawaban", "Jibu"),
    *("Ìdáhùn", "Idáhùn", "Idahun", "উত্তর", "उत्तर", "답변", "정답", "답", "答案", "答え", "回答", "解答", "答"),
    *("الإجابة الصحيحة هي", "الإجابة الصحيحة", "الإجابة النهائية", "الإجابة هي"),
    *("الإجابة", "إجابة", "الجواب النهائي", "الجواب"),
)
"""``Answer`` in English and the 14 languages of MMMLU (German, Spanish, French, Italian, Portuguese, Indonesian,
Swahili; Yoruba, Bengali, Hindi, Korean, Chinese, Japanese; Arabic)."""
OTHER_LETTERS = str.maketrans(
    # Arabic, Bengali and full-width letters that stand for A to D. Bengali as simple-evals has them.
    {**dict(zip("أبجد", "ABCD", strict=True)), **dict(zip("অবডঢ", "ABCD", strict=True))}
    | {chr(0xFF21 + number): chr(ord("A") + number) for number in range(26)}
)
DEFAULT_LETTERS = "ABCDEFGHIJ"
_DECORATION = r"(?:[\s*_$(){\[\\]|boxed|text|mathrm|mathbf){0,40}+"
"""Markdown and LaTeX between the colon and the letter: ``**Answer:** $\\boxed{\\text{B}}$``."""

_BOX = re.compile(rf"\\boxed\s*\{{{_DECORATION}(\w)[\s)}}]{{0,9}}\}}")
MOST_ANSWERS = 2
"""Different letters that a response may call its answer: a first one and a second thought."""


class MultipleChoice(Environment):
    """1 when the letter that a response names last is the row's answer."""

    name = "multiple_choice"
    needs_columns = frozenset({"answer"})
    has_side_effects = False

    def __init__(self, config: MultipleChoiceConfig) -> None:
        known = sorted({*ANSWER_WORDS, *filter(str.strip, config.answer_words)}, key=len, reverse=True)
        words = "|".join(map(re.escape, known))
        colon = "[*_ \\t]{0,4}[:：ঃ]"
        self._pattern = re.compile(rf"(?:{words}){colon}{_DECORATION}(\w)(?!\w)", re.IGNORECASE)
        self._boxed = config.boxed

    def score(self, prompt: Prompt, response: str) -> Score:
        wanted = required_answer(prompt, self.name).upper()
        given = self.letter(response, str(prompt.row.get("letters") or DEFAULT_LETTERS))
        return Score(float(given == wanted), correct=given == wanted, answer=given)

    def letter(self, response: str, letters: str) -> str | None:
        """The letter that a response names last, if it is one of those of the question and stands for itself."""
        found = list(self._pattern.finditer(response))
        if not found and self._boxed:
            found = list(_BOX.finditer(response))
        if not found or len({_plain(each[1]) for each in found}) > MOST_ANSWERS:
            return None
        letter, (begin, end) = _plain(found[-1][1]), found[-1].span(1)
        before, after = response[:begin], response[end : end + NEAR_CHARS]
        if letter not in letters or is_denied(before, after) or has_alternative(before, after, f"[{letters}]"):
            return None
        return letter


def _plain(letter: str) -> str:
    return letter.translate(OTHER_LETTERS).upper()
