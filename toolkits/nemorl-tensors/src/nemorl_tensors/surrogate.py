"""Parts of losses on reused samples: PPO's clipping, and the metrics of a probability ratio.

# N = tokens of all sequences concatenated, B = sequences

Pure functions of tensors, shared by the algorithms that clip a ratio. Not here: the ratio itself (``ratios.py``), the
KL term (``kl.py``), losses, their weights, advantages.
"""

from __future__ import annotations

import torch
from nemorl.metrics import Metric
from torch import Tensor

from nemorl_tensors.functional import masked_max, masked_mean, masked_min
from nemorl_tensors.mismatch import mismatch_metrics
from nemorl_tensors.ratios import probability_ratio


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic objective, to be maximised, and the clipped ratio.

    clipped_ratio = clip(ratio, 1 - clip_low, 1 + clip_high)
    surrogate = min(ratio * A, clipped_ratio * A)                                      arXiv:1707.06347, eq. 7
    A < 0 and dual_clip = c:  max(surrogate, c * A)                                          arXiv:1912.09729

    Differs from the paper: two bounds instead of one epsilon (arXiv:2503.14476).

    Args:
        ratio: [N] policy over old policy, with gradient; 1 in masked slots.
        advantages: [N], 0 in masked slots.
        clip_low: Distance of the lower bound from 1.
        clip_high: Distance of the upper bound from 1.
        dual_clip: Bound on the loss of negative advantages, as a multiple of the advantage.

    Returns:
        [N] and [N]; the surrogate is 0 in masked slots.
    """
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    return surrogate, clipped_ratio


def ratio_metrics(
    ratio: Tensor, clipped_ratio: Tensor, mask: Tensor, advantages: Tensor | None = None
) -> dict[str, Metric]:
    """How far the policy has moved: per token, or per response where the ratio is one ([B] with a [B] mask).

    ``probs_ratio_clamped_frac`` counts where the clip decides: a ratio above its bounds with a positive advantage, or
    below with a negative one, as verl's ``pg_clipfrac``; ``_low_frac`` and ``_high_frac`` are its two parts. The
    pessimistic minimum takes the other ratios as they are.

    Args:
        ratio: [N] policy over old policy.
        clipped_ratio: [N] within its bounds.
        mask: [N] bool.
        advantages: [N]. ``None``: the bounds hold whatever the advantage, as CISPO's.
    """
    low, high = ratio < clipped_ratio, ratio > clipped_ratio
    if advantages is not None:
        low, high = low & (advantages < 0), high & (advantages > 0)
    return {
        "probs_ratio": masked_mean(ratio, mask),
        "probs_ratio_min": masked_min(ratio, mask),
        "probs_ratio_max": masked_max(ratio, mask),
        "probs_ratio_clamped": masked_mean(clipped_ratio, mask),
        "probs_ratio_clamped_frac": masked_mean((low | high).float(), mask),
        "probs_ratio_clamped_low_frac": masked_mean(low.float(), mask),
        "probs_ratio_clamped_high_frac": masked_mean(high.float(), mask),
    }


def sampler_metrics(
    policy_logprobs: Tensor, old_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """How far the sampler's log-probs are from the trainer's, and the sampled estimate of the entropy.

    Those of :func:`nemorl_tensors.mismatch.mismatch_metrics`, and

    sampling_importance_ratio = mean exp(old - generation)
    approx_entropy = -mean exp(policy - generation) * policy

    Args:
        policy_logprobs: [N] nats, of the policy at hand.
        old_logprobs: [N] nats, the training backend's before the first update of the step.
        generation_logprobs: [N] nats, the sampler's.
        mask: [N] bool. Other slots may hold anything.
    """
    policy_logprobs = torch.where(mask, policy_logprobs.detach(), 0.0)
    old_logprobs = torch.where(mask, old_logprobs.detach(), 0.0)
    generation_logprobs = torch.where(mask, generation_logprobs, 0.0)
    entropy = -probability_ratio(policy_logprobs - generation_logprobs) * policy_logprobs
    return {
        **mismatch_metrics(old_logprobs, generation_logprobs, mask),
        "sampling_importance_ratio": masked_mean(probability_ratio(old_logprobs - generation_logprobs), mask),
        "approx_entropy": masked_mean(entropy, mask),
    }
