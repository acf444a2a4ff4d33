"""The environment of algorithms that learn without rewards."""

from __future__ import annotations

from nemorl.contracts.environment import Environment
from nemorl.types import Prompt, Score


class Unscored(Environment):
    """For algorithms that learn without rewards: no response is judged, and a conversation has one turn."""

    name = "unscored"

    def score(self, prompt: Prompt, response: str) -> Score:
        return Score(0.0, valid=False)
