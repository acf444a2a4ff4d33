"""Kahneman-Tversky optimisation: single responses, labelled good or bad, against how far the policy has drifted.

# B = sequences
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from nemorl.errors import DataError
from nemorl.metrics import Mean, Metrics, values
from nemorl.trainer import BaseTrainer
from nemorl.types import Row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.placement.tenant_resources import Remarks, TenantResources
from nemorl_tensors import TokenBatch

from nemorl_preference.kto.config import KTOConfig
from nemorl_preference.kto.loss import KTOLoss, reference_point
from nemorl_preference.kto.rows import judged, mismatched, to_batch
from nemorl_preference.references import References, look_ahead


class KTOTrainer(BaseTrainer[KTOConfig]):
    """Learns to make desirable responses likelier than the initial policy does, and undesirable ones less likely."""

    config_class = KTOConfig
    resources_class = TenantResources

    def setup(self) -> None:
        config = self.config
        self.tokenizer = Tokenizer.of(config.policy)
        self.loss = KTOLoss(config.beta, config.desirable_weight, config.undesirable_weight)
        self.references = References(self.run, precomputed=not config.needs_reference)
        self.references.precompute(batch for rows in self._all_rows() for batch in self.to_batches(rows))

    def own_hooks(self) -> Mapping[str, object]:
        return {"nemorl-rl:remarks": Remarks()}

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        # 1. How far the policy is from the reference on responses that were written for other prompts.
        batch, others = self.to_batches(rows)
        if not bool(batch.mask.any()):
            raise DataError("no row of this batch has a token to learn from", fix="raise policy.max_sequence_tokens")
        point = self.reference_point(others)

        # 2. One optimizer step against that point, which is the same for all microbatches and ranks.
        batch = self.against(point, batch)
        with self.run.timer.phase("policy_training"):
            update = self.run.policy.train_step(batch, self.loss)
        return {
            **update,
            "reference_point": Mean(point),
            "total_num_tokens": Mean(batch.num_tokens),
            "mean_length": Mean(batch.num_tokens, len(batch)),
        }

    def validate(self, rows: Sequence[Row]) -> dict[str, float]:
        """The loss and the metrics of training, on held-out rows."""
        batch, others = self.to_batches(rows)
        point = self.reference_point(others)
        batch = self.against(point, batch)
        loss, metrics = self.loss(self.run.policy.get_logprobs(batch), batch)
        return {"loss": float(loss), "reference_point": point, **values(metrics)}

    @property
    def batch_size(self) -> int:
        return self.config.batch_size

    def to_batches(self, rows: Sequence[Row]) -> tuple[TokenBatch, TokenBatch]:
        """The labelled responses of some rows; and the same prompts with each other's responses."""
        answers = [one for row in rows for one in judged(row, self.tokenizer)]
        limit = self.config.policy.max_sequence_tokens
        return to_batch(answers, limit), to_batch(mismatched(answers), limit)

    def reference_point(self, others: TokenBatch) -> float:
        """How far the policy has drifted, in nats, judged by mismatched responses."""
        with self.run.timer.phase("policy_and_reference_logprobs"):
            logprobs = self.run.policy.get_logprobs(others)
        return reference_point(logprobs, others, self.references.of(others))

    def against(self, point: float, batch: TokenBatch) -> TokenBatch:
        """The batch with what the loss reads of the initial policy, and the reference point."""
        return batch.with_sequences(
            reference_response_logprobs=self.references.of(batch), reference_points=torch.full((len(batch),), point)
        )

    def _all_rows(self) -> Iterator[Sequence[Row]]:
        """The rows of each validation and of each step: their neighbours decide which response goes to which prompt."""
        held_out = self.run.held_out
        if held_out is not None:
            yield from held_out.read(self.config.validation.max_samples).values()
        yield from look_ahead(self.data, self.total_steps, epochs=math.inf)
