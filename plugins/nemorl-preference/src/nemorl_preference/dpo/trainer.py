"""Direct preference optimisation: pairs against what the initial policy says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nemorl.types import Row
from nemorl_tensors import TokenBatch

from nemorl_preference.dpo.config import DPOConfig
from nemorl_preference.dpo.hinge import HingeLoss
from nemorl_preference.dpo.ipo import IPOLoss
from nemorl_preference.dpo.preference import PreferenceLoss
from nemorl_preference.dpo.sigmoid import SigmoidLoss
from nemorl_preference.pairs import PairTrainer
from nemorl_preference.references import References, look_ahead


class DPOTrainer(PairTrainer[DPOConfig]):
    """Learns to prefer the chosen responses more than the initial policy does."""

    config_class = DPOConfig

    def setup(self) -> None:
        super().setup()
        self.loss = loss_of(self.config)
        self.references = References(self.run, precomputed=not self.config.needs_reference)
        self.references.precompute(self.to_batch(rows) for rows in self._all_rows())

    def with_reference(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``reference_response_logprobs`` [B]."""
        return batch.with_sequences(reference_response_logprobs=self.references.of(batch))

    def _all_rows(self) -> Iterator[Sequence[Row]]:
        """Every row of the run in batches, held-out ones first."""
        held_out = self.run.held_out
        sets = held_out.read(self.config.validation.max_samples) if held_out is not None else {}
        for rows in sets.values():
            for start in range(0, len(rows), self.batch_size):
                yield rows[start : start + self.batch_size]
        yield from look_ahead(self.data, self.total_steps)


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
