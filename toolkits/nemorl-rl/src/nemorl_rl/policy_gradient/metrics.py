"""Metrics of a policy-gradient step beside those of its rollout and its loss, under the reference system's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemorl.metrics import Max, Mean, Metric, Min
from nemorl.types import Samples

from nemorl_rl.policy_gradient.advantages import EPSILON, differ

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch


def group_metrics(samples: Samples, advantages: Sequence[float]) -> dict[str, Metric]:
    """Spread of advantages, and how many groups teach nothing because all their rewards are equal.

    Args:
        samples: The responses of a step; those without a verdict are in no group.
        advantages: One per response, same order.

    Returns:
        ``advantages/mean``, ``/max``, ``/min``, over responses; ``baseline_reward/pct_0``, ``pct_1`` and ``pct_mixed``:
        percent of groups whose mean reward is 0, is 1, and whose rewards differ, the last of groups of several. NeMo
        RL counts responses by their baselines, and as mixed all whose baseline is neither 0 nor 1.

    Example:
        >>> from nemorl.types import Prompt, Sample, Samples, Score
        >>> def response(reward: float) -> Sample:
        ...     prompt = Prompt(0, "1+1=", (5,))
        ...     return Sample(prompt, (5, 6), (False, True), (0.0, -1.0), Score(reward), "2", "stop")
        >>> found = group_metrics(Samples([response(1.0), response(0.0)]), [0.5, -0.5])
        >>> found["advantages/max"].value, found["baseline_reward/pct_mixed"].value
        (0.5, 100.0)
    """
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if sample.score.valid:
            groups.setdefault(sample.prompt.index, []).append(sample.reward)
    means = [sum(rewards) / len(rewards) for rewards in groups.values()]
    mixed = [differ(rewards) for rewards in groups.values() if len(rewards) > 1]
    return {
        "advantages/mean": Mean.of(advantages),
        "advantages/max": Max.of(advantages),
        "advantages/min": Min.of(advantages),
        "baseline_reward/pct_0": Mean.of(100.0 * (abs(mean) <= EPSILON) for mean in means),
        "baseline_reward/pct_1": Mean.of(100.0 * (abs(mean - 1.0) <= EPSILON) for mean in means),
        **({"baseline_reward/pct_mixed": Mean.of(100.0 * each for each in mixed)} if mixed else {}),
    }


def advantage_metrics(batch: TokenBatch) -> dict[str, Metric]:
    """``without_gradient_frac``: the share of responses that the surrogate teaches nothing, as all advantages of their
    trained tokens are 0; whatever the engine makes of it, and whatever a KL term adds.

    Args:
        batch: N tokens; ``advantages`` is [N].

    Example:
        >>> import torch
        >>> from nemorl_tensors import TokenBatch
        >>> batch = TokenBatch.from_sequences([[5, 6], [5, 7]], [[False, True], [False, True]])
        >>> advantage_metrics(batch.with_tokens(advantages=torch.tensor([0.0, 0.5, 0.0, 0.0])))
        {'without_gradient_frac': Mean(total=1.0, count=2)}
    """
    from nemorl_tensors.functional import segment_any

    teaches = segment_any((batch["advantages"] != 0).logical_and_(batch.mask), batch.lengths)
    return {"without_gradient_frac": Mean.of((~teaches).float().tolist())}


def kl_metrics(batch: TokenBatch) -> dict[str, Metric]:
    """``kl_penalty``, the mean KL of a trained token, where rewards were charged with it (``with_kl``); else nothing.

    Args:
        batch: N tokens; ``kl`` is [N] nats.

    Example:
        >>> import torch
        >>> from nemorl_tensors import TokenBatch
        >>> batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
        >>> kl_metrics(batch)
        {}
        >>> kl_metrics(batch.with_tokens(kl=torch.tensor([0.0, 0.25, 0.75])))["kl_penalty"].value
        0.5
    """
    from nemorl_tensors import masked_mean

    return {"kl_penalty": masked_mean(batch["kl"], batch.mask)} if "kl" in batch else {}
