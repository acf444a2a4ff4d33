"""From rewards to advantages: how much better a response is than expected. Plain Python: a few numbers per response."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from nemorl.types import Sample, Samples

EPSILON = 1e-6
"""Added to a standard deviation unless a config says otherwise. Spreads below this are rounding noise and count as
zero."""


def differ(values: Sequence[float]) -> bool:
    """True where values are further apart than rounding can make them.

    Example:
        >>> differ([0.1 + 0.2, 0.3]), differ([0.3, 0.4])
        (False, True)
    """
    return len(values) > 1 and max(values) - min(values) > EPSILON


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    normalize_std: bool = True,
    leave_one_out: bool = True,
    epsilon: float = EPSILON,
) -> list[float]:
    """How much better each response is than the others of its group.

    A_i = (r_i - mean) / (std + epsilon)                         GRPO, arXiv:2402.03300
    Differs from the paper: ``leave_one_out`` takes mean and std over the group without i (RLOO, arXiv:2402.14740),
    std is the unbiased one, and ``normalize_std=False`` drops the denominator (Dr. GRPO, arXiv:2503.20783).

    Args:
        rewards: One scalar per response, any scale.
        group_ids: Prompt index of each response, same order. A group of one gets advantage 0.
        normalize_std: Divide by the standard deviation where it is not zero.
        leave_one_out: Exclude the response itself from its baseline and spread.
        epsilon: Added to the standard deviation.

    Returns:
        One advantage per response, in input order. All-equal rewards give zeros, hence no gradient.

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, 5.0, 5.0], [0, 0, 0, 1, 1], normalize_std=False)
        [1.0, -0.5, -0.5, 0.0, 0.0]
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(group_ids):
        groups[group].append(index)
    advantages = [0.0] * len(rewards)
    for members in groups.values():
        values = [rewards[index] for index in members]
        if len(members) == 1:
            continue
        known: dict[float, float] = {}  # equal rewards have equal peers, whose exact sums know no order
        for position, index in enumerate(members):
            reward = rewards[index]
            if reward not in known:
                peers = values[:position] + values[position + 1 :] if leave_one_out else values
                known[reward] = _advantage(reward, peers, normalize_std, epsilon)
            advantages[index] = known[reward]
    return advantages


def _advantage(reward: float, peers: Sequence[float], normalize_std: bool, epsilon: float) -> float:
    mean = math.fsum(peers) / len(peers)
    # Two passes: E[x^2] - E[x]^2 cancels, and a spread of exactly zero must come out as zero.
    spread = statistics.stdev(peers, mean) if normalize_std and len(peers) > 1 else 0.0
    return (reward - mean) / (spread + epsilon) if spread > EPSILON else reward - mean


def batch_normalized(
    advantages: Sequence[float], weights: Sequence[float], *, unbiased: bool = False, epsilon: float = EPSILON
) -> list[float]:
    """Advantages with mean 0 and standard deviation 1 over the whole batch.

    (A_i - mean) / (std + 1e-6), biased std                      REINFORCE++, arXiv:2501.03262, eq. 10

    Args:
        advantages: One per response.
        weights: How often each counts, e.g. its trained tokens: tokens of a response share its advantage.
        unbiased: Divide the sum of squares by one less than the sum of the weights.
        epsilon: Added to the standard deviation.

    Returns:
        One advantage per response, in input order. A spread that is rounding noise is not divided by.

    Example:
        >>> [round(value, 3) for value in batch_normalized([2.0, 0.0], weights=[1, 3])]  # mean 0.5, std sqrt(0.75)
        [1.732, -0.577]
    """
    total = math.fsum(weights)
    if total <= unbiased:
        return [0.0] * len(advantages)
    mean = math.fsum(a * w for a, w in zip(advantages, weights, strict=True)) / total
    centred = [advantage - mean for advantage in advantages]
    spread = math.sqrt(math.fsum(c * c * w for c, w in zip(centred, weights, strict=True)) / (total - unbiased))
    return [value / (spread + epsilon) for value in centred] if spread > EPSILON else centred


def clip_advantages(advantages: Sequence[float], low: float | None, high: float | None) -> list[float]:
    """Each advantage within [low, high]; ``None`` leaves that side open.

    Example:
        >>> clip_advantages([-3.0, 0.5, 3.0], -1.0, None)
        [-1.0, 0.5, 3.0]
    """
    floor, ceiling = -math.inf if low is None else low, math.inf if high is None else high
    return [min(max(value, floor), ceiling) for value in advantages]


def over_valid(
    samples: Samples,
    compute_advantages: Callable[[Samples], list[float]],
    low: float | None = None,
    high: float | None = None,
    min_group: int = 1,
) -> list[float]:
    """Advantages of the responses that have a verdict, among themselves and within [low, high]; 0 for the others.

    A response without one (``Score.valid``) is in no baseline, no spread and no mean, whatever estimates them.

    Args:
        samples: All responses of a step.
        compute_advantages: One advantage per response of the samples that it is given. It is never given none.
        low: Smallest advantage. None: any.
        high: Largest advantage. None: any.
        min_group: Verdicts that a group needs. Those of a smaller one count nowhere; one that never had as many
            responses needs all of its own.

    Returns:
        One advantage per response, in input order.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> def response(reward: float, valid: bool) -> Sample:
        ...     score = Score(reward, valid=valid)
        ...     return Sample(Prompt(0, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), score, "2", "stop")
        >>> samples = Samples([response(1.0, True), response(9.0, False), response(2.0, True)])
        >>> over_valid(samples, lambda valid: group_advantages(valid.rewards, valid.group_ids, normalize_std=False))
        [-1.0, 0.0, 1.0]
    """
    counts = are_counted(samples, min_group)
    counted = Samples([sample for sample, counts_here in zip(samples, counts, strict=True) if counts_here])
    found = iter(clip_advantages(compute_advantages(counted), low, high) if counted else ())
    return [next(found) if counts_here else 0.0 for counts_here in counts]


def are_counted(samples: Samples, min_group: int = 1) -> list[bool]:
    """Of each response, whether it has a verdict that may be compared with enough others of its prompt.

    Args:
        samples: All responses of a step.
        min_group: As in :func:`over_valid`.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> def response(index: int, valid: bool) -> Sample:
        ...     score = Score(1.0, valid=valid)
        ...     return Sample(Prompt(index, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), score, "2", "stop")
        >>> samples = Samples([response(0, True), response(0, False), response(1, True), response(1, True)])
        >>> are_counted(samples), are_counted(samples, min_group=2)
        ([True, False, True, True], [False, False, True, True])
    """
    sizes, verdicts = Counter(samples.group_ids), Counter(s.prompt.index for s in samples if s.score.valid)
    small = {index for index, size in sizes.items() if verdicts[index] < min(min_group, size)}
    return [sample.score.valid and sample.prompt.index not in small for sample in samples]


def dropped(samples: Samples, *, min_group: int = 1, overlong_filtering: bool = False) -> list[bool]:
    """Of each response, whether it trains nothing: without a verdict, in too small a group, or truncated with overlong
    filtering.

    Args:
        samples: All responses of a step.
        min_group: As in :func:`over_valid`.
        overlong_filtering: Leave truncated responses out of the loss (DAPO, arXiv:2503.14476).

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> cut = Sample(Prompt(0, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(1.0), "2", "length")
        >>> dropped(Samples([cut])), dropped(Samples([cut]), overlong_filtering=True)
        ([False], [True])
    """
    counted = are_counted(samples, min_group)
    return [not counts or (overlong_filtering and s.truncated) for counts, s in zip(counted, samples, strict=True)]


def has_spread(group: Sequence[Sample]) -> bool:
    """True for a group that teaches something: rewards that are all equal give advantage 0 (DAPO, arXiv:2503.14476).

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> def response(reward: float) -> Sample:
        ...     prompt = Prompt(0, "1+1=", (5,))
        ...     return Sample(prompt, (5, 6), (False, True), (0.0, -1.0), Score(reward), "2", "stop")
        >>> has_spread([response(1.0), response(1.0)]), has_spread([response(1.0), response(0.0)])
        (False, True)
    """
    return differ([sample.reward for sample in group])
