"""Training a reward model: encode a batch of pairs, one optimizer step on the difference of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from nemorl.errors import DataError
from nemorl.metrics import Mean, Metrics, values
from nemorl.trainer import BaseTrainer
from nemorl.types import Row
from nemorl_rl.data.encoding import encode_pair
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.placement.tenant_resources import Remarks, TenantResources
from nemorl_tensors import TokenBatch, pair_batch
from torch import Tensor

from nemorl_preference.rm.config import RMConfig
from nemorl_preference.rm.loss import BradleyTerryLoss

END = 0
"""Any token id: stands one past the end of a text, where its value is read. It is never fed to the model."""


class RMTrainer(BaseTrainer[RMConfig]):
    """Learns a number for each text, higher for the chosen one of a pair."""

    config_class = RMConfig
    resources_class = TenantResources

    def setup(self) -> None:
        self.tokenizer = Tokenizer.of(self.config.policy)
        self.loss = BradleyTerryLoss(self.config.center_loss_weight)

    def own_hooks(self) -> Mapping[str, object]:
        return {"nemorl-rl:remarks": Remarks()}

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        batch = self.to_batch(rows)
        if not bool(batch.mask.any()):
            raise DataError("no pair of this batch fits with its responses", fix="raise policy.max_sequence_tokens")
        with self.run.timer.phase("policy_training"):
            update = self.run.policy.train_step(batch, self.loss)
        text_tokens = batch.num_tokens - len(batch)
        return {**update, "total_num_tokens": Mean(text_tokens), "mean_length": Mean(text_tokens, len(batch))}

    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """The loss and the metrics of training, on held-out pairs."""
        batch = self.to_batch(rows)
        loss, metrics = self.loss(self.run.policy.get_values(batch), batch)
        return {"loss": float(loss), **values(metrics)}

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    def to_batch(self, rows: Sequence[Row]) -> TokenBatch:
        """The rows as one ragged batch, chosen and rejected in turn. Texts are cut at the length limit; a pair whose
        prompt alone reaches it trains nothing."""
        limit = self.config.policy.max_sequence_tokens
        chosen, rejected = [], []
        for row in rows:
            pair = encode_pair(row, self.tokenizer)
            is_scored = len(pair.prompt) < limit
            chosen.append(_scored_at_the_end((pair.prompt + pair.chosen)[:limit], is_scored))
            rejected.append(_scored_at_the_end((pair.prompt + pair.rejected)[:limit], is_scored))
        return pair_batch(chosen, rejected).with_sequences(margins=self._margins(rows))

    def _margins(self, rows: Sequence[Row]) -> Tensor:
        """[B] float32, each pair's twice."""
        column = self.config.margin_column
        if column is None:
            return torch.zeros(2 * len(rows))
        found = [_margin(row.get(column), column) for row in rows]
        return torch.tensor(found, dtype=torch.float32).repeat_interleave(2)


def _scored_at_the_end(ids: list[int], is_scored: bool) -> tuple[list[int], list[bool]]:
    return [*ids, END], [False] * len(ids) + [is_scored]


def _margin(given: object, column: str) -> float:
    if given is None:
        return 0.0
    if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given):
        return float(given)
    raise DataError(f"the margin in column {column!r} is {given!r}, not a number", fix="correct the row")
