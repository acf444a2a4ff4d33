"""Odds ratio preference optimisation: imitate the chosen responses, and prefer them by their odds."""

from __future__ import annotations

from collections.abc import Sequence

from nemorl.types import Row
from nemorl_tensors import TokenBatch

from nemorl_preference.likelihood import with_likelihood
from nemorl_preference.orpo.config import ORPOConfig
from nemorl_preference.orpo.loss import ORPOLoss
from nemorl_preference.pairs import PairTrainer


class ORPOTrainer(PairTrainer[ORPOConfig]):
    """Learns the chosen responses, and to give them better odds than the rejected ones."""

    config_class = ORPOConfig

    def setup(self) -> None:
        super().setup()
        self.loss = ORPOLoss(self.config.beta)

    def to_batch(self, rows: Sequence[Row]) -> TokenBatch:
        config = self.config
        return with_likelihood(super().to_batch(rows), config.loss_aggregation, of_prompts=config.prompt_loss)
