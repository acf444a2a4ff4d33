"""Direct preference optimisation: pairs against what the initial policy says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from nemorl.contracts import DataModule
from nemorl.types import Row
from nemorl_tensors import TokenBatch, segment_sum

from nemorl_preference.dpo.config import DPOConfig
from nemorl_preference.dpo.hinge import HingeLoss
from nemorl_preference.dpo.ipo import IPOLoss
from nemorl_preference.dpo.preference import PreferenceLoss
from nemorl_preference.dpo.reference import ReferenceTable
from nemorl_preference.dpo.sigmoid import SigmoidLoss
from nemorl_preference.pairs import PairTrainer


class DPOTrainer(PairTrainer[DPOConfig]):
    """Learns to prefer the chosen responses more than the initial policy does."""

    config_class = DPOConfig
    nothing_to_learn = "no pair of this batch has a token to learn from"

    def setup(self) -> None:
        super().setup()
        self.loss = loss_of(self.config)
        self.references: ReferenceTable | None = None
        if self.config.reference == "precomputed":
            self.references = self._precompute(ReferenceTable(self.run.path / "reference.safetensors"))

    def sequence(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[bool]]:
        limit = self.config.policy.max_sequence_tokens
        mask = [False] * len(prompt) + [True] * len(response)
        return (prompt + response)[:limit], mask[:limit]

    def with_reference(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``reference_response_logprobs`` [B]."""
        if self.references is not None:
            return batch.with_sequences(reference_response_logprobs=self.references.lookup(batch))
        with self.run.timer.phase("policy_and_reference_logprobs"):
            logprobs = self.run.policy.get_logprobs(batch, "reference")
        return batch.with_sequences(reference_response_logprobs=segment_sum(logprobs, batch.mask, batch.lengths))

    def _precompute(self, table: ReferenceTable) -> ReferenceTable:
        """Fill the table for all rows that the run will see. ``setup`` comes before any checkpoint is loaded: the
        policy is the initial one, in a resumed run too, so whatever is missing can still be computed."""
        found = len(table)
        self.run.console.phase("computing reference log-probs")
        for rows in self._all_rows():
            batch = replace(self.to_batch(rows), sequences_per_group=1)  # a response counts alone here
            missing = table.missing(batch)
            if missing:
                asked = batch.select(missing)
                table.add(asked, self.run.policy.get_logprobs(asked))
        if len(table) > found:
            table.save()
        self.run.directory.event("reference_logprobs", computed=len(table) - found, read=found)
        return table

    def _all_rows(self) -> Iterator[Sequence[Row]]:
        """Every row of the run in batches, held-out ones first."""
        held_out = self.run.held_out
        sets = held_out.read(self.config.validation.max_samples) if held_out is not None else {}
        for rows in sets.values():
            for start in range(0, len(rows), self.batch_size):
                yield rows[start : start + self.batch_size]
        yield from look_ahead(self.data, self.total_steps)


def look_ahead(data: DataModule, steps: int) -> Iterator[list[Row]]:
    """The next ``steps`` batches, or those of the first epoch if that is shorter; then ``data`` is where it was."""
    position = data.state_dict()
    try:
        for _ in range(steps):
            yield data.next_batch()
            if data.epoch > 0:
                break
    finally:
        data.load_state_dict(position)


def loss_of(config: DPOConfig) -> PreferenceLoss:
    """The loss that a config describes."""
    shared: dict[str, Any] = {
        "beta": config.beta,
        "average": config.averages_preference,
        "preference_weight": config.preference_loss_weight,
        "sft_weight": config.sft_loss_weight,
        "sft_average": config.sft_average_log_probs,
    }
    if config.loss == "sigmoid":
        return SigmoidLoss(**shared, label_smoothing=config.label_smoothing)
    return {"hinge": HingeLoss, "ipo": IPOLoss}[config.loss](**shared)
