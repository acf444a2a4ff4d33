"""Hindsight: the gradients that a recorded step would have had under other losses, bounds and filters.

The weights before the step come from its checkpoint, through the run's own training backend, as a Hugging Face folder;
the samples, the sampler's and the reference's log-probs from the record. No optimizer takes a step, and the run is only
read. A step of several updates is compared as one update over its whole batch, at the weights before the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nemorl.config.models import AuxiliaryModel
from nemorl.errors import UsageError
from nemorl.resources.manager import ResourceManager
from nemorl.types import Samples
from nemorl_rl.agents.seats import SeatScores
from nemorl_rl.policy_gradient.advantages import group_advantages, over_valid
from nemorl_rl.policy_gradient.config import PolicyGradientConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.policy_gradient.updates import transformed
from nemorl_tensors import TokenBatch

from nemorl_insight.diff.gradients import (
    Advance,
    Compared,
    Gradient,
    backpropagated,
    cosine,
    norm,
    policy_logprobs,
    reward_change,
    reward_coefficients,
    token_coefficients,
    weights_of,
)
from nemorl_insight.diff.hindsight_variants import Variant
from nemorl_insight.diff.recorded import RecordedStep
from nemorl_insight.diff.replaying import Replay
from nemorl_insight.diff.run_files import RunFiles

if TYPE_CHECKING:
    from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
    from torch import Tensor
    from torch.nn import Module


@dataclass(frozen=True)
class StepBefore:
    """A recorded step before its update: weights and samples."""

    step: int
    config: PolicyGradientConfig
    samples: Samples
    model: Module
    """The policy before the step, in float32 and evaluation mode."""
    recorded_old: Tensor | None
    """[N] log-probs that the trainer had at the start of the step, if they were recorded."""
    recorded_reference: Tensor | None

    @classmethod
    def load(cls, run: RunFiles, step: int, scratch: Path) -> StepBefore:
        """
        Args:
            run: The run.
            step: Which of its steps.
            scratch: An empty folder for the weights.

        Raises:
            UsageError: the run is of another kind, or did not keep the step's samples or the weights before it.
        """
        replay = Replay(run, step, scratch / "replay")
        config = _supported(run, replay.config())
        if replay.begins_after != step - 1:
            there = ", ".join(map(str, sorted(run.checkpoints))) or "none"
            raise UsageError(
                f"{run.path} has no checkpoint of step {step - 1}, which holds the weights that step {step} began with "
                f"(checkpoints: {there})",
                fix="give a --step that follows a checkpoint; `checkpoint: {every: 1, keep_every: 1}` keeps all in the "
                "next run",
            )
        recorded = RecordedStep.read(run, step, config.build())
        if recorded.media:
            raise UsageError(
                f"step {step} of {run.path} shows images or sounds, and hindsight computes gradients of text alone",
                fix=f"`nemorl compare replay {run.path} --step {step} --set …` makes a step of this run",
            )
        if any(isinstance(sample.score, SeatScores) for sample in recorded.samples):
            raise UsageError(
                f"in {run.path} the policy played several seats, and hindsight knows one reward per episode",
                fix=f"`nemorl compare replay {run.path} --step K --only trainer --set …` learns from this step anew",
            )
        folder = scratch / "weights"
        _write_weights(run, step, config, folder)
        # Where there is one update, it sees the old policy.
        alike = ["policy_logprobs"] if config.updates_per_step == 1 else []
        old, reference = _column(recorded, ["old_logprobs", *alike]), _column(recorded, ["reference_logprobs"])
        if config.needs_reference and reference is None:
            raise UsageError(
                f"{run.path} recorded no log-probs of the reference at step {step}, and its loss has a KL to it",
                fix="`records: {trainer_logprobs: true}` keeps them in the next run",
            )
        return cls(step, config, recorded.samples, _load(folder), old, reference)

    @cached_property
    def all_tokens(self) -> TokenBatch:
        """The batch of the whole step, with the leave-one-out differences of rewards as advantages."""
        differences = over_valid(
            self.samples, lambda valid: group_advantages(valid.rewards, valid.group_ids, normalize_std=False)
        )
        drop = [not sample.score.valid for sample in self.samples]
        temperature = self.config.generation.temperature
        return TokenBatch.from_samples(self.samples, differences, temperature=temperature, drop=drop)


def _supported(run: RunFiles, config: Any) -> PolicyGradientConfig:
    """
    Raises:
        UsageError: its gradient is made of more than log-probs and advantages of groups.
    """
    if not isinstance(config, PolicyGradientConfig):
        raise UsageError(
            f"{run.path} ran {config.algorithm}, which is no policy-gradient algorithm of groups",
            fix="give a run of grpo, cispo, gspo, dapo or their kin",
        )
    used = {
        "policy.lora": config.policy.lora is not None,
        "filtered_logprobs": config.filtered_logprobs,
        "entropy_bonus": config.entropy_bonus > 0,
        "high_entropy_frac": config.high_entropy_frac is not None,
        "message_penalties": config.message_penalties is not None,
    }
    if names := [name for name, is_used in used.items() if is_used]:
        raise UsageError(
            f"{run.path} trained with {', '.join(names)}, and hindsight computes gradients of all weights from plain "
            "log-probs",
            fix=f"give a run without; `nemorl compare replay {run.path} --step K --set …` makes a step of this one",
        )
    return config


def _write_weights(run: RunFiles, step: int, config: PolicyGradientConfig, folder: Path) -> None:
    """The weights before the step as a model folder: the backend reads or, for step 1, initialises them."""
    with closing(ResourceManager(config, folder.parent)) as resources:
        policy = resources.auxiliary_policy("policy", AuxiliaryModel(config.policy, config.policy_head), 1)
        if step > 1:
            policy.load_checkpoint(run.checkpoints[step - 1] / "policy")
        policy.save_pretrained(folder)


def _load(folder: Path) -> Module:
    from transformers import AutoModelForCausalLM

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module in model.modules():
        # Batches have no padding: training backends give the row of this token a gradient like any other.
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    moved: Module = model.to(accelerator or "cpu").eval()
    return moved


def _column(recorded: RecordedStep, names: Sequence[str]) -> Tensor | None:
    """[N] numbers of the first of these columns that all sequences have."""
    sequences = [sequence for row in recorded.rows for sequence in row["sequences"]]
    for name in names:
        if all(sequence[name] is not None for sequence in sequences):
            return torch.tensor([value for one in sequences for value in one[name]], dtype=torch.float32)
    return None


@dataclass(frozen=True)
class Hindsight:
    """The variants of a step, compared."""

    rows: Sequence[Compared]
    """The run's own first."""
    lr: float
    response_tokens: int
    logprob_gap: float | None
    """Largest difference, in nats, of the log-probs computed here and those that the trainer recorded."""
    gradients: Sequence[Gradient] = ()
    """Of the rows, where they were asked for."""


def passes(variants: Sequence[Variant], before: StepBefore) -> int:
    """Sequences that :func:`look_back` takes through the model."""
    return len(before.samples.sequences) * (2 + len(variants))


def look_back(
    before: StepBefore, variants: Sequence[Variant], advance: Advance = lambda: None, *, keep: bool = False
) -> Hindsight:
    """The gradient of each variant at the same weights, and how it compares with the first one's.

    Args:
        before: The step.
        variants: The run's own first.
        advance: Called after each sequence of each pass.
        keep: Return the gradients too; else no more than three are in memory at a time.
    """
    everything = before.all_tokens
    policy = policy_logprobs(before.model, everything, advance)
    everything = everything.with_tokens(old_logprobs=policy)
    gap = None
    if before.recorded_old is not None:
        gap = float(torch.where(everything.mask, policy - before.recorded_old, 0.0).abs().max())
    if before.recorded_reference is not None:
        everything = everything.with_tokens(reference_logprobs=before.recorded_reference)
    scored = sum(sample.score.valid for sample in before.samples)
    rising = reward_coefficients(policy, everything, scored)
    tokens = sum(sum(part.response_mask) for part in before.samples.sequences)
    lr = before.config.policy.optimizer.lr
    measure = Measure(backpropagated(before.model, everything, rising, advance), lr, tokens)
    own: Gradient | None = None
    rows, kept = [], []
    for variant in variants:
        seen = Seen.by(variant, before, everything)
        gradient = backpropagated(before.model, seen.batch, seen.coefficients, advance)
        own = gradient if own is None else own
        rows.append(_compared(seen, gradient, own, measure))
        kept += [gradient] if keep else []
    return Hindsight(rows, lr, tokens, gap, kept)


@dataclass(frozen=True)
class Measure:
    """What all gradients of a step are held against."""

    reward_gradient: Gradient
    lr: float
    response_tokens: int


@dataclass(frozen=True)
class Seen:
    """What a variant's loss sees: advantages, masks and transforms as its own trainer makes them."""

    variant: Variant
    responses: int
    loss: PolicyGradientLoss
    batch: TokenBatch
    policy: Tensor
    """[N] log-probs of the weights before the step."""

    @classmethod
    def by(cls, variant: Variant, before: StepBefore, everything: TokenBatch) -> Seen:
        """
        Args:
            variant: The variant.
            before: The step.
            everything: All tokens of the step, with ``old_logprobs``, those of the policy.
        """
        trainer: Any = variant.config.build()
        assert isinstance(trainer, PolicyGradientTrainer), "its config is of the family"
        trainer.setup()
        trainer.progress.step = before.step
        samples, config, loss = variant.kept(before.samples, before.step), variant.config, trainer.loss
        places = {id(part): place for place, part in enumerate(before.samples.sequences)}
        tokens = everything.select([places[id(part)] for part in samples.sequences])
        policy, batch = tokens["old_logprobs"], tokens
        if samples:
            bounds = config.advantage_clip_low, config.advantage_clip_high, config.rollouts.min_group
            batch = trainer.to_batch(samples, over_valid(samples, trainer.compute_advantages, *bounds))
            names = [name for name in ("old_logprobs", "reference_logprobs") if name in tokens]
            batch = batch.with_tokens(**{name: tokens[name] for name in names})
            batch, _ = transformed(batch, samples, trainer.transforms)
        if variant.to_sampler:
            batch = batch.with_tokens(old_logprobs=batch["generation_logprobs"])
            loss = replace(loss, on_policy=False, correction=None)
        return cls(variant, len(samples), loss, batch, policy)

    @property
    def coefficients(self) -> Tensor:
        """[N] derivative of the loss by the log-probs."""
        return token_coefficients(self.loss, self.policy, self.batch)


def _compared(seen: Seen, gradient: Gradient, own: Gradient, measure: Measure) -> Compared:
    weights = weights_of(seen.loss, seen.policy, seen.batch, measure.response_tokens)
    length, own_length = norm(gradient), norm(own)
    return Compared(
        seen.variant.name,
        type(seen.loss).__name__,
        seen.responses,
        length,
        length / own_length if own_length > 0 else None,
        cosine(gradient, own),
        weights.effective_tokens,
        weights.carrying_frac,
        reward_change(measure.reward_gradient, gradient, measure.lr),
    )
