"""The trainers behind ``algorithms`` and ``configs``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from nemorl.metrics import Mean, Metrics, Sum
from nemorl.types import Row
from nemorl_grpo.trainer import GRPOTrainer
from nemorl_sft.trainer import SFTTrainer
from nemorl_tensors import TokenBatch
from torch import Tensor

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


@dataclass(frozen=True)
class MeanOverWhatIsShown:
    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return -policy_logprobs[batch.mask].sum() / batch.mask.sum().clamp(min=1), {}


class OwnNormalisationTrainer(SFTTrainer):
    config_class = algorithms.OwnNormalisation
    loss = MeanOverWhatIsShown()  # type: ignore[assignment]


class SoundGRPOTrainer(GRPOTrainer):
    config_class = algorithms.SoundGRPO


@dataclass(frozen=True)
class TimesMask:
    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        per_token = policy_logprobs * batch["advantages"] * batch.mask
        return -(per_token * batch.loss_weights).sum(), {}


class SpillingTrainer(GRPOTrainer):
    config_class = algorithms.SpillsMaskedSlots

    def setup(self) -> None:
        self.loss = TimesMask()  # type: ignore[assignment]


class SyncsNowAndThenTrainer(GRPOTrainer):
    """Every other train_step ends without ``self.sync_weights()``."""

    config_class = algorithms.SyncsNowAndThen

    def sync_weights(self) -> None:
        if self.step % 2 == 0:  # what resumes from step 2 has the weights of step 2 either way
            super().sync_weights()
