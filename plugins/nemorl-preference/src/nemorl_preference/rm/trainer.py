"""Training a reward model: pairs by the difference of their values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from nemorl.errors import DataError
from nemorl.types import Row
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_preference.pairs import PairTrainer
from nemorl_preference.rm.config import RMConfig
from nemorl_preference.rm.loss import BradleyTerryLoss

END = 0
"""Any token id: stands one past the end of a text, where its value is read. It is never fed to the model."""


class RMTrainer(PairTrainer[RMConfig]):
    """Learns a number for each text, higher for the chosen one of a pair."""

    config_class = RMConfig
    nothing_to_learn = "no pair of this batch fits with its responses"
    tokens_beside_text = 1

    def setup(self) -> None:
        super().setup()
        self.loss = BradleyTerryLoss(self.config.center_loss_weight)

    def to_batch(self, rows: Sequence[Row]) -> TokenBatch:
        return super().to_batch(rows).with_sequences(margins=self._margins(rows))

    def sequence(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[bool]]:
        """A text is scored at its end. A pair whose prompt alone reaches the length limit trains nothing."""
        limit = self.config.policy.max_sequence_tokens
        ids = (prompt + response)[:limit]
        return [*ids, END], [False] * len(ids) + [len(prompt) < limit]

    def _margins(self, rows: Sequence[Row]) -> Tensor:
        """[B] float32, each pair's twice."""
        column = self.config.margin_column
        if column is None:
            return torch.zeros(2 * len(rows))
        found = [_margin(row.get(column), column) for row in rows]
        return torch.tensor(found, dtype=torch.float32).repeat_interleave(2)


def _margin(given: object, column: str) -> float:
    if given is None:
        return 0.0
    if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given):
        return float(given)
    raise DataError(f"the margin in column {column!r} is {given!r}, not a number", fix="correct the row")
