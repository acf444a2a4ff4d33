"""Credit of each response relative to the other responses of its prompt. Plain Python: a few numbers per response."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

EPSILON = 1e-6
"""Added to the standard deviation. Spreads below it are rounding noise and count as zero."""


def differ(values: Sequence[float]) -> bool:
    """True where values are further apart than rounding can make them: 0.1 + 0.2 and 0.3 are equal."""
    return len(values) > 1 and max(values) - min(values) > EPSILON


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    normalize_std: bool = True,
    leave_one_out: bool = True,
) -> list[float]:
    """Credit of each response relative to the others of its group.

    A_i = (r_i - mean) / (std + 1e-6)                            GRPO, arXiv:2402.03300
    Differs from the paper: ``leave_one_out`` takes mean and std over the group without i (RLOO, arXiv:2402.14740),
    std is the unbiased one, and ``normalize_std=False`` drops the denominator (Dr. GRPO, arXiv:2503.20783).

    Args:
        rewards: One scalar per response, any scale.
        group_ids: Prompt index of each response, same order. A group of one gets advantage 0.
        normalize_std: Divide by the standard deviation where it is not zero.
        leave_one_out: Exclude the response itself from its baseline and spread.

    Returns:
        One advantage per response, in input order. All-equal rewards give zeros, hence no gradient.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(group_ids):
        groups[group].append(index)
    advantages = [0.0] * len(rewards)
    for members in groups.values():
        values = [rewards[index] for index in members]
        for position, index in enumerate(members):
            peers = values[:position] + values[position + 1 :] if leave_one_out else values
            advantages[index] = _advantage(rewards[index], peers, normalize_std) if len(members) > 1 else 0.0
    return advantages


def _advantage(reward: float, peers: Sequence[float], normalize_std: bool) -> float:
    mean = math.fsum(peers) / len(peers)
    # Two passes: E[x^2] - E[x]^2 cancels, and a spread of exactly zero must come out as zero.
    spread = statistics.stdev(peers, mean) if normalize_std and len(peers) > 1 else 0.0
    return (reward - mean) / (spread + EPSILON) if spread > EPSILON else reward - mean


def mean_normalized(rewards: Sequence[float], group_ids: Sequence[int]) -> list[float]:
    """How many times its group's mean a reward is above it.

    A_i = (r_i - mean) / mean                                    MaxRL, arXiv:2602.02710

    Args:
        rewards: One per response, none negative.
        group_ids: Prompt index of each response, same order.

    Returns:
        One advantage per response, in input order; zeros where the mean is 0 or all rewards are equal.
    """
    means = _group_means(rewards, group_ids)
    return [
        (reward - means[group]) / means[group] if means[group] > EPSILON else 0.0
        for reward, group in zip(rewards, group_ids, strict=True)
    ]


def batch_normalized(advantages: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Advantages with mean 0 and standard deviation 1 over the whole batch.

    (A_i - mean) / (std + 1e-6), biased std                      REINFORCE++, arXiv:2501.03262, eq. 10

    Args:
        advantages: One per response.
        weights: How often each counts, e.g. its trained tokens: tokens of a response share its advantage.

    Returns:
        One advantage per response, in input order. A spread that is rounding noise is not divided by.
    """
    total = math.fsum(weights)
    if total == 0:
        return [0.0] * len(advantages)
    mean = math.fsum(a * w for a, w in zip(advantages, weights, strict=True)) / total
    centred = [advantage - mean for advantage in advantages]
    spread = math.sqrt(math.fsum(c * c * w for c, w in zip(centred, weights, strict=True)) / total)
    return [value / (spread + EPSILON) for value in centred] if spread > EPSILON else centred


def _group_means(rewards: Sequence[float], group_ids: Sequence[int]) -> dict[int, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, group_ids, strict=True):
        groups[group].append(reward)
    return {group: math.fsum(values) / len(values) for group, values in groups.items()}


def clip_advantages(advantages: Sequence[float], low: float | None, high: float | None) -> list[float]:
    """Each advantage within [low, high]; ``None`` leaves that side open."""
    floor, ceiling = -math.inf if low is None else low, math.inf if high is None else high
    return [min(max(value, floor), ceiling) for value in advantages]
