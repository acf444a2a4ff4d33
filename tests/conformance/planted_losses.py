"""Losses with a bug each, of the kinds that people write, and the clause of the certificate that has to find it.

# N = tokens of all sequences concatenated, B = sequences, P = pairs (B = 2P)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from nemorl.metrics import Mean, Metrics
from nemorl_tensors import TokenBatch, masked_mean, pair_weights, segment_mean, segment_sum, split_pairs
from torch import Tensor

FIELDS = frozenset({"advantages", "old_logprobs", "generation_logprobs"})


def log_ratio_of(policy: Tensor, batch: TokenBatch, name: str = "old_logprobs") -> Tensor:
    return torch.where(batch.mask, policy - batch[name], 0.0).clamp(-20.0, 20.0)


def advantages_of(batch: TokenBatch) -> Tensor:
    return torch.where(batch.mask, batch["advantages"], 0.0)


def surrogate(policy: Tensor, batch: TokenBatch, *, name: str = "old_logprobs") -> Tensor:
    """[N] PPO's, with a clip of 0.2."""
    ratio, advantages = log_ratio_of(policy, batch, name).exp(), advantages_of(batch)
    return torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def reinforced(policy: Tensor, batch: TokenBatch) -> Tensor:
    """[N] advantages times log-probs."""
    return advantages_of(batch) * torch.where(batch.mask, policy, 0.0)


def metrics_of(batch: TokenBatch) -> Metrics:
    """What reads the sampler's log-probs."""
    return {"sampled": masked_mean(batch["generation_logprobs"], batch.mask)}


@dataclass(frozen=True)
class Sound:
    """PPO's clipped surrogate, and nothing is wrong with it."""

    requires: frozenset[str] = FIELDS

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -(surrogate(policy, batch) * batch.loss_weights).sum()

    def __call__(self, policy: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        return self.value(policy, batch), metrics_of(batch)


@dataclass(frozen=True)
class SoundPairs:
    """DPO, and nothing is wrong with it."""

    requires: frozenset[str] = frozenset({"reference_response_logprobs"})

    def margins(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        ratios_B = segment_sum(policy, batch.mask, batch.lengths) - batch["reference_response_logprobs"]
        chosen_P, rejected_P = split_pairs(ratios_B)
        return chosen_P - rejected_P

    def __call__(self, policy: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        costs_P = torch.nn.functional.softplus(-self.margins(policy, batch))
        weights_P = pair_weights(batch)
        return (torch.where(weights_P > 0, costs_P, 0.0) * weights_P).sum(), {}


@dataclass(frozen=True)
class SoundCISPO(Sound):
    """A weight without gradient times the log-prob."""

    def weight(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return log_ratio_of(policy.detach(), batch).exp().clamp(max=5.0)

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -(self.weight(policy, batch) * reinforced(policy, batch) * batch.loss_weights).sum()


# Denominators


class DividesByTokensShown(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -surrogate(policy, batch).sum() / batch.mask.sum().clamp(min=1)


class DividesByRowsShown(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return super().value(policy, batch) / len(batch)


class AddsUpMeansOfRows(Sound):
    """The weights of the step are not asked."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -segment_mean(surrogate(policy, batch), batch.mask, batch.lengths).sum()


class DividesByLengthsWithPrompts(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        lengths = torch.repeat_interleave(batch.lengths, batch.lengths)
        return -(surrogate(policy, batch) * batch.loss_weights / lengths).sum()


class NormalisesAdvantagesShown(Sound):
    """By the mean of the microbatch."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        mean = advantages_of(batch).sum() / batch.mask.sum().clamp(min=1)
        return super().value(policy, batch.with_tokens(advantages=batch["advantages"] - mean))


class AddsAConstant(Sound):
    """Once a microbatch."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return super().value(policy, batch) + 0.01


# Masks and padding


class MultipliesByTheMask(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -(policy * batch["advantages"] * batch.mask * batch.loss_weights).sum()


class IgnoresTheMaskInRatiosOfRows(Sound):
    """The mean log ratio of a row is one of its prompt, too."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        everything = torch.ones_like(batch.mask)
        mean_B = segment_mean(policy - batch["old_logprobs"], everything, batch.lengths)
        ratio = torch.repeat_interleave(mean_B.exp(), batch.lengths)
        return -(ratio * advantages_of(batch) * batch.loss_weights).sum()


class GuessesTheMaskFromPadding(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        keep = batch.mask & (batch.token_ids != 0)
        return -(torch.where(keep, surrogate(policy, batch), 0.0) * batch.loss_weights).sum()


class ShiftsOnceMore(Sound):
    """Advantages of the token before: the first one of a response has the prompt's."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        seen = torch.where(batch.mask & batch.mask.roll(1), surrogate(policy, batch), 0.0)
        return -(seen * batch.loss_weights).sum()


class DropsTheEnd(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        keep = torch.ones_like(batch.mask)
        keep[torch.cumsum(batch.lengths, 0) - 1] = False
        return -(torch.where(keep, surrogate(policy, batch), 0.0) * batch.loss_weights).sum()


# Signs, clips, and which two are compared


class ClimbsTheLoss(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -super().value(policy, batch)


class TurnsTheRatioRound(Sound):
    """old / policy"""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        ratio = (-log_ratio_of(policy, batch)).exp()
        return -(ratio * advantages_of(batch) * batch.loss_weights).sum()


class ClipsTheWrongSide(Sound):
    """The larger of the two products."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        ratio, advantages = log_ratio_of(policy, batch).exp(), advantages_of(batch)
        surrogate = torch.maximum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(surrogate * batch.loss_weights).sum()


class ComparesWithTheSampler(Sound):
    """The ratio is that to ``generation_logprobs``, and ``old_logprobs`` are computed for nothing."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -(surrogate(policy, batch, name="generation_logprobs") * batch.loss_weights).sum()


class RejectedFirst(SoundPairs):
    def margins(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -super().margins(policy, batch)


@dataclass(frozen=True)
class FleesItsReturns:
    """A critic."""

    requires: frozenset[str] = frozenset({"returns"})

    def __call__(self, values: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        errors = torch.where(batch.mask, values - batch["returns"], 0.0)
        return -(errors.square() * batch.loss_weights).sum(), {}


class HalvesForPairs(SoundPairs):
    """Chosen responses are the first half of the batch, as padded layouts have it."""

    def margins(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        ratios_B = segment_sum(policy, batch.mask, batch.lengths) - batch["reference_response_logprobs"]
        return ratios_B[: len(batch) // 2] - ratios_B[len(batch) // 2 :]


class FreezesTheRejected(SoundPairs):
    """Detached where nothing is to be."""

    def margins(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        ratios_B = segment_sum(policy, batch.mask, batch.lengths) - batch["reference_response_logprobs"]
        chosen_P, rejected_P = split_pairs(ratios_B)
        return chosen_P - rejected_P.detach()


# What has a gradient


class ForgetsToDetachItsWeight(SoundCISPO):
    def weight(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return log_ratio_of(policy, batch).exp().clamp(max=5.0)


@dataclass(frozen=True)
class ForgetsToDetachTheOldPolicy(Sound):
    """On policy the ratio is 1, whatever the policy."""

    requires: frozenset[str] = frozenset({"advantages", "generation_logprobs"})

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return super().value(policy, batch.with_tokens(old_logprobs=policy))


class DetachesEverything(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return super().value(policy.detach(), batch)


class TakesItsWeightByItem(Sound):
    """The mean ratio of a row as numbers: a part of the gradient is missing, and nothing says that it is to be."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        means = segment_mean(log_ratio_of(policy, batch), batch.mask, batch.lengths).exp().tolist()
        weights = torch.repeat_interleave(torch.tensor(means), batch.lengths)
        return -(weights * reinforced(policy, batch) * batch.loss_weights).sum()


class ComputesInFloat32(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return super().value(policy.float(), batch)


# Order, state and memory


class ReadsAdvantagesByRow(Sound):
    """Takes the [N] field for one of [B]."""

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        advantages = batch["advantages"][-len(batch) :][batch.sequence_ids]
        return super().value(policy, batch.with_tokens(advantages=advantages))


class FavoursFirstRows(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        return -(surrogate(policy, batch) * batch.loss_weights / (1 + batch.sequence_ids)).sum()


@dataclass(frozen=True)
class KeepsABaseline(Sound):
    """A running mean that lives in the worker."""

    seen: list[float] = field(default_factory=list)

    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        baseline = sum(self.seen) / len(self.seen) if self.seen else 0.0
        self.seen.append(float(advantages_of(batch).sum()))
        return super().value(policy, batch.with_tokens(advantages=batch["advantages"] - baseline))


class WritesIntoTheBatch(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        batch["advantages"].mul_(0.5)
        return super().value(policy, batch)


class WritesIntoTheOutputs(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        policy.masked_fill_(~batch.mask, 0.0).clamp_(min=-2.0)
        return super().value(policy, batch)


@dataclass(frozen=True)
class HoldsAFunction(Sound):
    """Which no worker can be sent."""

    transform: Callable[[Tensor], Tensor] = field(default_factory=lambda: lambda value: value)


# What it says of itself


@dataclass(frozen=True)
class ReadsWhatItDoesNotDeclare(Sound):
    requires: frozenset[str] = frozenset({"advantages", "generation_logprobs"})


@dataclass(frozen=True)
class DeclaresAReference(Sound):
    """And no KL to it is in the loss."""

    requires: frozenset[str] = FIELDS | {"reference_logprobs"}


class AveragesAverages(Sound):
    def __call__(self, policy: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        mean = float(policy.detach()[batch.mask].mean()) if batch.mask.any() else 0.0
        return self.value(policy, batch), {**metrics_of(batch), "logprob": Mean(mean)}


class SaysThatGainsTeachNothing(Sound):
    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return segment_sum((batch["advantages"] < 0).float(), batch.mask, batch.lengths) > 0


class OverflowsFarAway(Sound):
    def value(self, policy: Tensor, batch: TokenBatch) -> Tensor:
        ratio = torch.where(batch.mask, batch["old_logprobs"] - policy, 0.0).exp()
        return super().value(policy, batch) + 0.01 * (ratio * batch.loss_weights).sum()


SOUND: tuple[Any, ...] = (Sound(), SoundPairs(), SoundCISPO())
PLANTED: tuple[tuple[Any, str], ...] = (
    (DividesByTokensShown(), "microbatches_add_up"),
    (DividesByRowsShown(), "microbatches_add_up"),
    (AddsUpMeansOfRows(), "loss_weights_weigh"),
    (DividesByLengthsWithPrompts(), "padding_changes_nothing"),
    (NormalisesAdvantagesShown(), "microbatches_add_up"),
    (AddsAConstant(), "nothing_to_train_costs_nothing"),
    (MultipliesByTheMask(), "padding_changes_nothing"),
    (IgnoresTheMaskInRatiosOfRows(), "padding_changes_nothing"),
    (GuessesTheMaskFromPadding(), "every_token_id_teaches"),
    (ShiftsOnceMore(), "first_tokens_teach"),
    (DropsTheEnd(), "last_tokens_teach"),
    (ClimbsTheLoss(), "a_step_raises_the_better_action"),
    (TurnsTheRatioRound(), "a_step_raises_the_better_action"),
    (ClipsTheWrongSide(), "a_clip_lets_come_back"),
    (ComparesWithTheSampler(), "declared_fields_matter"),
    (RejectedFirst(), "a_step_raises_the_better_action"),
    (FleesItsReturns(), "a_step_brings_values_nearer"),
    (HalvesForPairs(), "order_changes_nothing"),
    (FreezesTheRejected(), "every_place_of_a_group_teaches"),
    (ForgetsToDetachItsWeight(), "a_step_raises_the_better_action"),
    (ForgetsToDetachTheOldPolicy(), "a_step_raises_the_better_action"),
    (DetachesEverything(), "it_computes"),
    (TakesItsWeightByItem(), "gradient_is_that_of_the_value"),
    (ComputesInFloat32(), "gradient_is_that_of_the_value"),
    (ReadsAdvantagesByRow(), "order_changes_nothing"),
    (FavoursFirstRows(), "order_changes_nothing"),
    (KeepsABaseline(), "calls_leave_nothing_behind"),
    (WritesIntoTheBatch(), "calls_leave_nothing_behind"),
    (WritesIntoTheOutputs(), "calls_leave_nothing_behind"),
    (HoldsAFunction(), "shards_add_up"),
    (ReadsWhatItDoesNotDeclare(), "it_computes"),
    (DeclaresAReference(), "declared_fields_matter"),
    (AveragesAverages(), "metrics_add_up"),
    (SaysThatGainsTeachNothing(), "has_gradient_is_true"),
    (OverflowsFarAway(), "stays_finite"),
)
"""A bug, and the clause that is to name it; others may see it too."""
