"""The trainers behind ``algorithms`` and ``configs``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from nemorl.metrics import Mean, Metrics, Sum
from nemorl.types import Row, Samples
from nemorl_distillation.trainer import OPDTrainer
from nemorl_grpo.trainer import GRPOTrainer
from nemorl_ppo.trainer import PPOTrainer
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


@dataclass(frozen=True)
class NLLInFloat32:
    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        kept = torch.where(batch.mask, policy_logprobs.float(), 0.0)
        return -(kept * batch.loss_weights).sum(), {}


class RoundsToFloat32Trainer(SFTTrainer):
    config_class = algorithms.RoundsToFloat32
    loss = NLLInFloat32()  # type: ignore[assignment]


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


class SyncsTooLateTrainer(GRPOTrainer):
    config_class = algorithms.SyncsTooLate

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        super().sync_weights()
        return super().train_step(rows)

    def sync_weights(self) -> None:
        """The next step will."""


# What only training shows, or a look at every token

Changed = Callable[[Tensor, Tensor, TokenBatch], Tensor]
"""Another loss, given the sound one, the outputs [N] and the batch."""


@dataclass(frozen=True)
class Spoilt:
    """A loss that becomes another one."""

    inner: Any
    change: Changed

    @property
    def requires(self) -> frozenset[str]:
        found: frozenset[str] = self.inner.requires
        return found

    def __call__(self, outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        value, metrics = self.inner(outputs, batch)
        return self.change(value, outputs, batch), metrics


def negative(value: Tensor, outputs: Tensor, batch: TokenBatch) -> Tensor:
    return -value


def late(value: Tensor, outputs: Tensor, batch: TokenBatch) -> Tensor:
    """A weighted sum of what stands one token further on than the mask, and has a weight there."""
    seen = torch.where(batch.mask & batch.mask.roll(1), outputs, 0.0)
    advantages = torch.where(batch.mask, batch["advantages"], 0.0)
    return -(seen * advantages * batch.loss_weights).sum()


def late_values(value: Tensor, outputs: Tensor, batch: TokenBatch) -> Tensor:
    errors = torch.where(batch.mask & batch.mask.roll(1), outputs - batch["returns"], 0.0)
    return (errors.square() * batch.loss_weights).sum()


def mean_of_shown(value: Tensor, outputs: Tensor, batch: TokenBatch) -> Tensor:
    return (outputs - batch["returns"])[batch.mask].square().sum() / batch.mask.sum().clamp(min=1)


def times_mask(value: Tensor, outputs: Tensor, batch: TokenBatch) -> Tensor:
    return value + 0.0 * (batch["returns"] * batch.mask).sum()


class WantsTheWorstTrainer(GRPOTrainer):
    config_class = algorithms.WantsTheWorst

    def compute_advantages(self, samples: Samples) -> list[float]:
        return [-advantage for advantage in super().compute_advantages(samples)]


class ClimbsTheLossTrainer(GRPOTrainer):
    config_class = algorithms.ClimbsTheLoss

    def build_loss(self) -> Any:
        return Spoilt(super().build_loss(), negative)


class UnlearningTrainer(SFTTrainer):
    config_class = algorithms.Unlearns
    loss = Spoilt(SFTTrainer.loss, negative)  # type: ignore[assignment]


class RollsItsMaskTrainer(GRPOTrainer):
    config_class = algorithms.RollsItsMask

    def to_batch(self, samples: Samples, advantages: Sequence[float]) -> TokenBatch:
        batch = super().to_batch(samples, advantages)
        mask = batch.mask.roll(1)
        mask[torch.cumsum(batch.lengths, 0) - batch.lengths] = False  # which no batch may train on
        return replace(batch, mask=mask).with_new_weights()


class LosesTheEndTrainer(SFTTrainer):
    config_class = algorithms.LosesTheEnd

    def to_batch(self, rows: Sequence[Row]) -> TokenBatch:
        batch = super().to_batch(rows)
        mask = batch.mask.clone()
        mask[torch.cumsum(batch.lengths, 0) - 1] = False
        return replace(batch, mask=mask).with_new_weights()


class RollsTheMaskOfItsLossTrainer(GRPOTrainer):
    config_class = algorithms.RollsTheMaskOfItsLoss

    def build_loss(self) -> Any:
        return Spoilt(super().build_loss(), late)


@dataclass(frozen=True)
class WithMeanLogprob:
    """Reports a mean as if it were of one token."""

    inner: Any
    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        value, metrics = self.inner(policy_logprobs, batch)
        return value, {**metrics, "mean_logprob": Mean(float(policy_logprobs.detach()[batch.mask].mean()))}


class AveragesAveragesTrainer(SFTTrainer):
    config_class = algorithms.AveragesAverages
    loss = WithMeanLogprob(SFTTrainer.loss)  # type: ignore[assignment]


class SoundPPOTrainer(PPOTrainer):
    config_class = algorithms.SoundPPO
    change: Changed | None = None

    def setup(self) -> None:
        super().setup()
        if self.change is not None:
            self.value_loss = Spoilt(self.value_loss, self.change)  # type: ignore[assignment]


class CriticFleesTrainer(SoundPPOTrainer):
    config_class = algorithms.CriticFlees
    change = staticmethod(negative)


class CriticAveragesTrainer(SoundPPOTrainer):
    config_class = algorithms.CriticAverages
    change = staticmethod(mean_of_shown)


class CriticRollsItsMaskTrainer(SoundPPOTrainer):
    config_class = algorithms.CriticRollsItsMask
    change = staticmethod(late_values)


class CriticTimesMaskTrainer(SoundPPOTrainer):
    config_class = algorithms.CriticTimesMask
    change = staticmethod(times_mask)


class SoundStudentTrainer(OPDTrainer):
    config_class = algorithms.SoundStudent


class DisagreesTrainer(OPDTrainer):
    config_class = algorithms.Disagrees

    def setup(self) -> None:
        super().setup()
        self.loss = Spoilt(self.loss, negative)  # type: ignore[assignment]
