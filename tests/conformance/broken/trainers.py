"""The trainers behind ``algorithms`` and ``configs``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nemorl.observe.metrics import Mean, Metrics, Sum
from nemorl.types import Row
from nemorl_sft.trainer import SFTTrainer

from broken import algorithms, configs


class SoundTrainer(SFTTrainer):
    config_class = algorithms.SoundSFT


class OtherNameTrainer(SFTTrainer):
    config_class = algorithms.OtherName


class UnreadableTrainer(SFTTrainer):
    config_class = configs.UnreadableAlgorithm


class LenientTrainer(SFTTrainer):
    config_class = configs.LenientAlgorithm


class DivergingTrainer(SFTTrainer):
    config_class = algorithms.Diverges

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        metrics = super().train_step(rows)
        return {**metrics, "entropy": Mean(math.nan)} if self.step == 2 else metrics


class LookingTrainer(SFTTrainer):
    config_class = algorithms.OnlyLooks

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        batch = self.to_batch(rows)
        loss, _ = self.loss(self.run.policy.get_logprobs(batch), batch)
        return {"loss": Sum(float(loss))}


class ForgetfulTrainer(SFTTrainer):
    """How many rows it trains on depends on a counter that is not saved."""

    config_class = algorithms.Forgetful
    calls = 0

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        self.calls += 1
        return super().train_step(rows[: self.calls])


class FixedSeedTrainer(SFTTrainer):
    config_class = algorithms.FixedSeed
