"""Supervised fine-tuning: encode a batch of rows, one optimizer step on their likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from nemorl.errors import DataError
from nemorl.metrics import Mean, Metrics
from nemorl.trainer import BaseTrainer
from nemorl.types import Row
from nemorl_rl.data.encoding import encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.placement.tenant_resources import Remarks, TenantResources
from nemorl_tensors import TokenBatch

from nemorl_sft.config import SFTConfig
from nemorl_sft.loss import NLLLoss


class SFTTrainer(BaseTrainer[SFTConfig]):
    """Maximum likelihood on given responses."""

    config_class = SFTConfig
    resources_class = TenantResources
    loss = NLLLoss()

    def setup(self) -> None:
        self.tokenizer = Tokenizer.of(self.config.policy)

    def own_hooks(self) -> Mapping[str, object]:
        return {"nemorl-rl:remarks": Remarks()}

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        batch = self.to_batch(rows)
        with self.run.timer.phase("policy_training"):
            update = self.run.policy.train_step(batch, self.loss)
        return {**update, "total_num_tokens": Mean(batch.num_tokens), "mean_length": Mean(batch.num_tokens, len(batch))}

    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """``val_loss``: mean negative log-likelihood of the held-out rows, in nats per trained token."""
        batch = self.to_batch(rows)
        loss, _ = self.loss(self.run.policy.get_logprobs(batch), batch)
        return {"val_loss": float(loss)}

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    def to_batch(self, rows: Sequence[Row]) -> TokenBatch:
        """The rows as one ragged batch; rows beyond the length limit are cut at its end."""
        limit = self.config.policy.max_sequence_tokens
        only_last = self.config.only_last_turn
        encoded = [encode_row(row, self.tokenizer, only_last_turn=only_last).cut(limit) for row in rows]
        batch = TokenBatch.from_sequences(
            [row.ids for row in encoded],
            [row.mask for row in encoded],
            loss_aggregation=self.config.loss_aggregation,
            media=chain.from_iterable(row.media for row in encoded),
        )
        if not bool(batch.mask.any()):
            raise DataError("no row of this batch has a token to learn from", fix="raise policy.max_sequence_tokens")
        return batch
