"""Changes to a reward between the environment and the advantage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile, takewhile

from nemorl.types import Sample, Samples

from nemorl_rl.policy_gradient.config import OverlongPenalty, RewardScaling, RewardShaping
from nemorl_rl.policy_gradient.penalties import LowEffort


def shaped_rewards(samples: Samples, config: RewardShaping) -> list[float]:
    """Rewards after effort, scaling, then length shaping, in sample order.

    Args:
        samples: Scored responses.
        config: An algorithm's config that has the block ``RewardShaping``.

    Returns:
        One reward per response, in input order; as the environment gave them where the config asks for nothing.

    Example:
        >>> from nemorl.types import Prompt, Sample, Score
        >>> from nemorl_rl.policy_gradient.config import RewardScaling, RewardShaping
        >>> response = Sample(Prompt(0, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(8.0), "2", "stop")
        >>> shaped_rewards(Samples([response]), RewardShaping(reward_scaling=RewardScaling(source_max=10.0)))
        [0.8]
    """
    rewards = samples.rewards
    if config.low_effort is not None:
        effort = config.low_effort
        rewards = [with_effort(r, s, effort) for r, s in zip(rewards, samples, strict=True)]
    if config.reward_scaling is not None:
        rewards = scale(rewards, config.reward_scaling)
    if config.overlong_penalty is not None:
        penalty = config.overlong_penalty
        rewards = [r + overlong(s.response_tokens, penalty) for r, s in zip(rewards, samples, strict=True)]
    if config.truncation_reward_factor is not None:
        factor = config.truncation_reward_factor
        rewards = [r * factor if s.truncated else r for r, s in zip(rewards, samples, strict=True)]
    return rewards


def scale(rewards: Sequence[float], scaling: RewardScaling) -> list[float]:
    """Clamp to [source_min, source_max], then map linearly to [target_min, target_max].

    Example:
        >>> from nemorl_rl.policy_gradient.config import RewardScaling
        >>> scale([-1.0, 0.5, 7.0], RewardScaling(target_max=10.0))
        [0.0, 5.0, 10.0]
    """
    slope = (scaling.target_max - scaling.target_min) / (scaling.source_max - scaling.source_min)
    clamped = [min(max(reward, scaling.source_min), scaling.source_max) for reward in rewards]
    return [scaling.target_min + (reward - scaling.source_min) * slope for reward in clamped]


def with_effort(reward: float, sample: Sample, effort: LowEffort) -> float:
    """The reward of an answer to a prompt that asks for little effort; of others as it is.

    bonus = min(1, weight * (1 - tokens / max_tokens))
    reward + reward * max(bonus, 0) + penalty * min(bonus, 0)                   ``effort_levels`` of NeMo RL

    Args:
        reward: As the environment gave it.
        sample: Whose tokens are those of its last answer.
        effort: Of an algorithm's config.

    Example:
        >>> from types import SimpleNamespace
        >>> sample = SimpleNamespace(prompt=SimpleNamespace(text="briefly: 1+1"), response_mask=[True] * 5)
        >>> with_effort(1.0, sample, LowEffort(phrase="briefly", weight=1.0, max_tokens=10))
        1.5
    """
    if effort.phrase not in sample.prompt.text:
        return reward
    bonus = min(1.0, effort.weight * (1 - last_answer_tokens(sample.response_mask) / effort.max_tokens))
    return reward + reward * max(bonus, 0.0) + effort.penalty * min(bonus, 0.0)


def last_answer_tokens(mask: Sequence[bool]) -> int:
    """Tokens of the last answer among several.

    >>> last_answer_tokens([False, True, False, True, True, False])
    2
    """
    from_the_end = dropwhile(lambda is_sampled: not is_sampled, reversed(mask))
    return sum(1 for _ in takewhile(bool, from_the_end))


def overlong(response_tokens: int, penalty: OverlongPenalty) -> float:
    """0 until the buffer begins, then linearly down to -penalty at the limit and on (arXiv:2503.14476, eq. 13).

    Differs from the paper: beyond the limit the line continues instead of ending at -penalty, so that longer is worse.

    Example:
        >>> from nemorl_rl.policy_gradient.config import OverlongPenalty
        >>> penalty = OverlongPenalty(max_response_tokens=100, buffer_tokens=20)
        >>> overlong(80, penalty), overlong(90, penalty), overlong(100, penalty)
        (0.0, -0.5, -1.0)
    """
    start = penalty.max_response_tokens - penalty.buffer_tokens
    return min(0.0, -(response_tokens - start) / penalty.buffer_tokens * penalty.penalty)
