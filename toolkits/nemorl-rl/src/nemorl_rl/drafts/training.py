"""One learning step of a draft per step of its policy, on the responses that the policy has just sampled.

The algorithm knows nothing of it: a hook trains the draft when the responses are there, and the weights go to the
engines with the policy's next ones (``placement.engines``).

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from nemorl.metrics import Metrics, values
from nemorl.types import Sample, Samples
from nemorl_tensors import TokenBatch

from nemorl_rl.drafts.config import KeepFresh
from nemorl_rl.placement.tenants import DRAFT
from nemorl_rl.policy_gradient.updates import run_updates

if TYPE_CHECKING:
    from nemorl.trainer import BaseTrainer
    from torch import Tensor


@dataclass(frozen=True)
class DraftLoss:
    """loss = sum(loss_weights * (generation_logprobs - draft_logprobs)), in nats per trained token.

    Tokens are drawn from the policy, so its expectation is KL(policy || draft), and its gradient that of the next-token
    cross-entropy: the policy's log-probs are constants. Distillation by sampled tokens, as in DistillSpec
    (arXiv:2310.08461). Differs from the paper: no distribution of the teacher is needed but its log-probs of what it
    sampled.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"generation_logprobs"})

    def __call__(self, draft_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        per_token = torch.where(batch.mask, batch["generation_logprobs"] - draft_logprobs, 0.0)
        return (per_token * batch.loss_weights).sum(), {}


class DraftTrainer:
    """A hook object that trains the run's draft on every step's responses. What fails in it ends the run."""

    essential = True

    def __init__(self, settings: KeepFresh) -> None:
        self._settings = settings
        self._found: Mapping[str, float] = {}
        """Metrics that are not logged yet"""

    def on_step_begin(self) -> None:
        self._found = {}  # of a step that ended early, with a lost worker

    def on_rollout_end(self, trainer: BaseTrainer[Any], step: int, samples: Samples) -> None:
        if not self._settings.trains_at(step):
            return
        kept = spread([one for one in samples if not one.media], self._settings.max_tokens)
        with trainer.run.timer.phase("draft_training"):
            batch = TokenBatch.from_samples(Samples(kept), temperature=trainer.config.sampler.temperature)
            if not batch.mask.any():
                return
            minibatches = batch.minibatches(min(self._settings.updates, len(kept)))
            metrics = values(run_updates(trainer.run.auxiliary_models[DRAFT], DraftLoss(), minibatches))
        self._found = {"train/draft_loss": metrics["loss"]}

    def on_fit_end(self, trainer: BaseTrainer[Any]) -> None:
        """Beside the model of a run that is complete lies the draft that goes with it."""
        if trainer.config.checkpoint.export and trainer.step >= trainer.total_steps:
            trainer.run.auxiliary_models[DRAFT].save_pretrained(trainer.run.path / DRAFT)

    def on_log(self, metrics: dict[str, float]) -> None:
        metrics.update(self._found)
        self._found = {}


def spread(samples: Sequence[Sample], max_tokens: int | None) -> list[Sample]:
    """About so many tokens of samples, or one sample, taken evenly from all of them: no prompt is preferred.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> one = Sample(Prompt(0, "1+1=", (5,)), (5, 7), (False, True), (0.0, -0.5), Score(1.0), "2", "stop")
        >>> len(spread([one] * 6, max_tokens=7))
        3
    """
    total = sum(len(part.token_ids) for one in samples for part in one.sequences)
    if max_tokens is None or total <= max_tokens:
        return list(samples)
    count = max(1, len(samples) * max_tokens // total)
    return [samples[place * len(samples) // count] for place in range(count)]
