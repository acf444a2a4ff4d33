"""The work of one step, in sequences and in the tokens that a layout of rows computes for them.

# P = prompt, R = response, G = responses of a prompt, all in tokens or sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RowLayout = Literal["padded", "packed", "shared"]
"""How sequences become rows: each in a row of its own, one behind the other, or with what they have in common once."""
MIN_SHARING = 1.2
"""Tokens of the sequences per computed one from which backends share (``nemorl_tensors.engines.prefix_forest``)."""


@dataclass(frozen=True)
class Work:
    """One step."""

    sequences: int
    """Responses, or rows of data"""
    prompt_tokens: float
    """Mean"""
    response_tokens: float
    """Mean; of rows of data, the tokens trained on"""
    longest_response: float
    """Expected response tokens of a step's last sequence"""
    group: int = 1
    """Responses to one prompt"""
    updates: int = 1
    """Optimizer steps"""
    passes: int = 1
    """Times that each sequence is trained on"""
    old_frac: float = 0.0
    """Of the sequences, those whose log-probs before the first update are computed apart"""

    @property
    def length(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> float:
        """Of all sequences."""
        return self.sequences * self.length

    @property
    def sharing(self) -> float:
        """Tokens of the sequences per distinct one, the metric ``tree_ratio`` where they are shared.

        G (P + R - 1) / (P + G (R - 1))
        """
        distinct = self.prompt_tokens + self.group * (self.response_tokens - 1)
        return self.group * (self.length - 1) / distinct if distinct > 0 else 1.0

    def computed_tokens(self, layout: RowLayout) -> float:
        """Of all sequences, padding not counted. The last token of a sequence is never fed: it predicts nothing."""
        fed = self.sequences * (self.length - 1)
        return fed / self.sharing if layout == "shared" else fed

    def squares(self, layout: RowLayout) -> float:
        """Twice the pairs of a query and what it attends to. Shared: a group's prompt attends to itself once."""
        if layout != "shared":
            return self.sequences * self.length**2
        prompt = self.prompt_tokens**2
        return self.sequences / self.group * (prompt + self.group * (self.length**2 - prompt))
