"""Scores one response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.types import Prompt, Score

if TYPE_CHECKING:
    from nemorl_example.config import ExampleConfig


class ExampleEnvironment(Environment):
    """Called from several threads at a time: keep no state, or lock it."""

    name = "example"

    def __init__(self, config: ExampleConfig) -> None:
        self._config = config

    def score(self, prompt: Prompt, response: str) -> Score:
        if prompt.answer is None:
            raise DataError(f"the row of {prompt.text[:60]!r} has no answer", fix="use rows with an `answer` column")
        too_long = len(response) > self._config.max_chars
        words = response.split()
        said = words[-1].rstrip(".!") if words else None
        right = said == prompt.answer and not too_long
        # `answer` is what majority votes count, `metrics` are logged as train/environment/<name>.
        return Score(float(right), metrics={"too_long": float(too_long)}, correct=right, answer=said)
