"""Responses and tokens on which trainer and sampler disagree are left out of a batch.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from nemorl.metrics import Max, Mean, Metric, Sum
from nemorl.types import Samples
from nemorl_tensors import TokenBatch, segment_mean, segment_sum
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio


@dataclass(frozen=True)
class DropFilteredOut:
    """Tokens of probability 0 (``old_logprobs`` of -inf) train nothing, and the others share their weight.

    The sampler kept them: its top-k and top-p were taken of log-probs that rounded otherwise. Differs from NeMo RL,
    which sets such an old log-prob to 0, so that the ratio is the probability itself.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
        >>> batch = batch.with_tokens(old_logprobs=torch.tensor([0.0, -torch.inf, -0.5]))
        >>> kept, _ = DropFilteredOut()(batch, Samples(()))
        >>> kept.mask.tolist(), kept.loss_weights.tolist()
        ([False, False, True], [0.0, 0.0, 1.0])
    """

    requires: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        mask = batch.mask & batch["old_logprobs"].isfinite()
        return replace(batch, mask=mask).with_new_weights(), {}


@dataclass(frozen=True)
class DropDisagreeing:
    """Sequences whose error is above ``limit`` train nothing and the others share their weight; with metrics of them.

    error_b = mean over the trained tokens of exp(|old_logprob - generation_logprob|)        0 where there are none

    ``token_mult_prob_error`` of a sequence. A log-prob of the sampler that is not finite counts as 20 nats off.
    As ``seq_logprob_error_threshold`` of NeMo RL does, after advantages: a response that is dropped still counts in the
    baseline of its group.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6], [5, 7]], [[False, True], [False, True]])
        >>> sampled = torch.tensor([1.0, 0.5, 1.0, 0.5]).log()
        >>> old = torch.tensor([1.0, 0.5, 1.0, 0.25]).log()
        >>> batch = batch.with_tokens(old_logprobs=old, generation_logprobs=sampled)
        >>> kept, metrics = DropDisagreeing(1.05)(batch, Samples(()))
        >>> kept.mask.tolist(), kept.loss_weights.tolist(), metrics["dropped_disagreeing"].value
        ([False, True, False, False], [0.0, 1.0, 0.0, 0.0], 1.0)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"old_logprobs", "generation_logprobs"})

    limit: float
    """Largest mean factor between the probabilities of a token; 1 is agreement."""

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        gap = masked_log_ratio(batch["old_logprobs"], batch["generation_logprobs"], batch.mask)
        gap = torch.nan_to_num(gap, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).abs()
        errors = segment_mean(probability_ratio(gap), batch.mask, batch.lengths)
        trained = segment_sum(batch.mask.float(), batch.mask, batch.lengths) > 0
        kept = errors <= self.limit
        mask = batch.mask & kept[batch.sequence_ids]
        measured = errors[trained].tolist()
        metrics: dict[str, Metric] = {
            "sequence_mult_prob_error": Mean.of(measured),
            "max_sequence_mult_prob_error": Max(max(measured, default=0.0)),
            "dropped_disagreeing": Sum(float((trained & ~kept).sum())),
        }
        return replace(batch, mask=mask).with_new_weights(), metrics
