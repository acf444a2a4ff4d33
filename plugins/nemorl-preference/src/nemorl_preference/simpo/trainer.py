"""Simple preference optimisation: pairs against nothing but a margin."""

from __future__ import annotations

from collections.abc import Sequence

from nemorl.types import Row
from nemorl_tensors import TokenBatch

from nemorl_preference.likelihood import with_likelihood
from nemorl_preference.pairs import PairTrainer
from nemorl_preference.simpo.config import SimPOConfig
from nemorl_preference.simpo.loss import SimPOLoss


class SimPOTrainer(PairTrainer[SimPOConfig]):
    """Learns to make the chosen responses likelier per token than the rejected ones, by a margin."""

    config_class = SimPOConfig

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.loss = SimPOLoss(
            config.beta, config.sft_loss_weight, gamma=config.gamma, label_smoothing=config.label_smoothing
        )

    def to_batch(self, rows: Sequence[Row]) -> TokenBatch:
        return with_likelihood(super().to_batch(rows), self.config.loss_aggregation)
