"""Importance corrections: what a token's gradient is worth when another engine, or older weights, sampled it.

# N = tokens of all sequences concatenated, B = sequences

A rollout is drawn from the sampler's distribution, the gradient is written for the trainer's. With
``log_ratio = old_logprobs - generation_logprobs``, weighting each token by ``exp(log_ratio)`` repairs that in
expectation, and the kinds differ in what they do about weights that are too large or too far off to be trusted.

A correction multiplies the policy-gradient term of a loss, never the KL term, and carries no gradient. It does not
touch ``loss_weights``: a token or sequence that is left out contributes 0, as in the reference system, and the others
weigh no more for it. Where both engines agree, every kind gives exactly 1. Log ratios count as ±20 at most. One that
is not finite, of a token which the sampler says it cannot have drawn, gives weight 0 (``nemorl_tensors.ratios``), and
the metric ``nonfinite_sampler_logprobs`` counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from nemorl.metrics import Mean, Metric
from nemorl_tensors import TokenBatch, masked_mean, segment_mean, segment_sum
from nemorl_tensors.ratios import importance_weight, probability_ratio
from torch import Tensor

from nemorl_rl.policy_gradient.config import ImportanceCorrection

Correction = Callable[[Tensor, TokenBatch], tuple[Tensor, dict[str, Metric]]]
"""A function ``(log_ratio [N], batch) -> (weights [N], metrics)``; ``log_ratio`` is 0 where ``batch.mask`` is False.

Example:
    >>> correction: Correction | None = build_correction(ImportanceCorrection(kind="truncated"))
"""


@dataclass(frozen=True)
class Plain:
    """Every token by its own ratio.

    w_t = exp(log_ratio_t)

    Unbiased, of unbounded variance (https://fengyao.notion.site/off-policy-rl).

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
        >>> Plain()(torch.tensor([1.0, 2.0, 0.5, 8.0]).log(), batch)[0].tolist()
        [1.0, 2.0, 0.5, 8.0]
    """

    def __call__(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        return _measured(importance_weight(log_ratio), batch)


@dataclass(frozen=True)
class Truncated:
    """Truncated importance sampling, TIS: no token weighs more than the cap, nor less than ``low``.

    w_t = clamp(exp(log_ratio_t), low, cap)               (https://fengyao.notion.site/off-policy-rl)

    Differs from the source: the lower bound, which is NeMo RL's; a token that the sampler cannot have drawn stays at 0.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
        >>> Truncated(cap=2.0)(torch.tensor([1.0, 2.0, 0.5, 8.0]).log(), batch)[0].tolist()
        [1.0, 2.0, 0.5, 2.0]
    """

    cap: float = 2.0
    low: float = 0.0

    def __call__(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        ratio = importance_weight(log_ratio)
        weights = torch.where(log_ratio.isfinite(), ratio.clamp(self.low, self.cap), 0.0)
        out_of_bounds = (ratio < self.low) | (ratio > self.cap)
        return _measured(weights, batch, out_of_bounds=masked_mean(out_of_bounds, batch.mask))


@dataclass(frozen=True)
class IcePop:
    """IcePop: a token on which the engines disagree too much teaches nothing.

    w_t = exp(log_ratio_t) if low <= exp(log_ratio_t) <= high else 0      (https://hijkzzz.notion.site/online-ice-pop)

    Differs from the source: not at all.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
        >>> IcePop(low=0.5, high=5.0)(torch.tensor([1.0, 2.0, 0.5, 8.0]).log(), batch)[0].tolist()
        [1.0, 2.0, 0.5, 0.0]
    """

    low: float = 0.5
    high: float = 5.0

    def __call__(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        ratio = importance_weight(log_ratio)
        kept = (ratio >= self.low) & (ratio <= self.high)
        return _measured(torch.where(kept, ratio, 0.0), batch, out_of_bounds=masked_mean(~kept, batch.mask))


@dataclass(frozen=True)
class SequenceMask:
    """A whole response teaches nothing when the geometric mean of its token ratios leaves the bounds.

    mean_ratio_b = exp(mean of log_ratio over the trained tokens of sequence b)
    w_t = exp(log_ratio_t) if low <= mean_ratio_b <= high else 0

    From "When Speed Kills Stability" (https://yingru.notion.site); ``seq-mask-tis`` in NeMo RL. The bounds are tight
    because a mean over many tokens is: one token off by 2 nats moves that of a thousand by 0.2 %.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
        >>> SequenceMask(low=0.5, high=1.5)(torch.tensor([1.0, 2.0, 0.5, 8.0]).log(), batch)[0].tolist()
        [0.0, 0.0, 0.0, 0.0]
    """

    low: float = 0.999
    high: float = 1.002

    def __call__(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        mean_ratio = probability_ratio(segment_mean(log_ratio, batch.mask, batch.lengths))
        kept = (mean_ratio >= self.low) & (mean_ratio <= self.high)
        trained = segment_sum(batch.mask.float(), batch.mask, batch.lengths) > 0
        weights = torch.where(kept[batch.sequence_ids], importance_weight(log_ratio), 0.0)
        return _measured(weights, batch, out_of_bounds=masked_mean(~kept, trained))


@dataclass(frozen=True)
class KPop:
    """KPop: a token teaches nothing where trainer and sampler are too far apart, seen from either of them.

    p, q = exp(old_logprobs), exp(generation_logprobs), within [1e-8, 1 - 1e-8]
    KL(p, q) = p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))
    w_t = exp(log_ratio_t) if max(KL(p, q), KL(q, p)) <= divergence else 0         (https://ringtech.notion.site/kpop)

    Differs from IcePop: a likely token may not move far, a rare one may.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
        >>> batch = batch.with_tokens(generation_logprobs=torch.tensor([1.0, 0.01, 0.5]).log())
        >>> KPop(divergence=0.5)(torch.tensor([1.0, 4.0, 1.98]).log(), batch)[0].round(decimals=2).tolist()
        [1.0, 4.0, 0.0]
    """

    divergence: float = 2.0

    def __call__(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        sampled = torch.where(batch.mask, batch["generation_logprobs"], 0.0)
        q, p = (logs.exp().clamp(1e-8, 1 - 1e-8) for logs in (sampled, sampled + log_ratio))
        distance = torch.maximum(_binary_kl(p, q), _binary_kl(q, p))
        kept = ~batch.mask | (distance <= self.divergence)
        weights = torch.where(kept, importance_weight(log_ratio), 0.0)
        return _measured(weights, batch, out_of_bounds=masked_mean(~kept, batch.mask))


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of two distributions over a token and all others, in nats."""
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


@dataclass(frozen=True)
class OfSequences:
    """Another correction, told of each token the ratio of its whole response.

    log_ratio_t = sum of log_ratio over the trained tokens of its sequence

    The weight of a response under importance sampling, as in NeMo RL with ``sequence_level_importance_ratios``.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
        >>> OfSequences(Truncated(cap=3.0))(torch.tensor([1.0, 2.0, 0.5, 8.0]).log(), batch)[0].tolist()
        [1.0, 3.0, 3.0, 3.0]
    """

    correction: Correction

    def __call__(self, log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        per_sequence = segment_sum(log_ratio, batch.mask, batch.lengths)
        spread = torch.where(batch.mask, per_sequence[batch.sequence_ids], 0.0)
        return self.correction(spread, batch)


def build_correction(config: ImportanceCorrection | None) -> Correction | None:
    """The correction that a config asks for.

    Args:
        config: The field ``importance_correction`` of an algorithm's config.

    Returns:
        ``(log_ratio [N], batch) -> (weights [N], metrics)``, or None where tokens are not weighed.

    Example:
        >>> from nemorl_rl.policy_gradient.config import ImportanceCorrection
        >>> build_correction(ImportanceCorrection(kind="truncated", cap=3.0))
        Truncated(cap=3.0, low=0.0)
    """
    if config is None:
        return None
    names = ("cap", "low", "high", "divergence")
    bounds = {name: value for name in names if (value := getattr(config, name)) is not None}
    kinds: dict[str, Callable[..., Correction]] = {
        "plain": Plain,
        "truncated": Truncated,
        "icepop": IcePop,
        "sequence_mask": SequenceMask,
        "kpop": KPop,
    }
    correction = kinds[config.kind](**bounds)
    return OfSequences(correction) if config.per == "sequence" else correction


def _measured(
    weights: Tensor, batch: TokenBatch, out_of_bounds: Mean | None = None
) -> tuple[Tensor, dict[str, Metric]]:
    """The weights with their metrics, under the reference system's names.

    sampling_importance_ratio = mean weight of the trained tokens
    is_oob_ratio = share of tokens (sequence_mask: of sequences) out of bounds, clipped or left out
    """
    metrics: dict[str, Metric] = {"sampling_importance_ratio": masked_mean(weights, batch.mask)}
    if out_of_bounds is not None:
        metrics["is_oob_ratio"] = out_of_bounds
    return weights, metrics
