"""GDPO: several rewards, each normalised within its group before they are added up.

arXiv:2601.05242. Normalising the sum, as GRPO does, makes different combinations of rewards look alike (1 + 0 and
0 + 1), and lets the reward with the largest spread decide.

A_i = sum over components n of reward_weights[n] * (r_i_n - mean_n(group)) / (std_n(group) + 1e-6)
A_i <- (A_i - mean) / (std + 1e-6)            over all responses of the step; std as ``batch_std`` says

The components are those of ``Score.components``; the reward itself is not used, so there is no reward shaping here.

Differs from the paper: a component's std within its group is the unbiased one, and where it is zero nothing is divided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, Literal

from nemorl.errors import ConfigIssue, UsageError
from nemorl.types import Sample, Samples
from nemorl_rl.policy_gradient.advantages import EPSILON, batch_normalized, differ, group_advantages
from nemorl_rl.policy_gradient.config import ClippedConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.rollouts.outcomes import outcome_of

ANSWERED = {"scored", "truncated"}
"""Outcomes of episodes that the environment gave components to."""


class GDPOConfig(ClippedConfig):
    """Group reward-decoupled normalisation policy optimisation (arXiv:2601.05242)."""

    summary: ClassVar[str] = "GRPO for several rewards, each normalised on its own"
    trainer: ClassVar[str] = "nemorl_grpo.variants.gdpo:GDPOTrainer"

    algorithm: Literal["gdpo"] = "gdpo"
    """Name of the algorithm."""
    reward_weights: dict[str, float] | tuple[float, ...] | None = None
    """Weight of each component of the reward by name, all of them; or a list, in the alphabetical order of the names.
    Unset: 1 each."""
    batch_std: Literal["population", "sample"] = "population"
    """Divisor of the sum of the components: its standard deviation over the responses of the step as that of a
    population, plus 1e-6, or of a sample (n - 1), and nothing added, as in NeMo RL."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.reward_weights is not None and len(self.reward_weights) < 2:
            yield ConfigIssue(
                "reward_weights", "GDPO weighs at least two rewards", "name them all, or use `algorithm: grpo`"
            )


class GDPOTrainer(PolicyGradientTrainer[GDPOConfig]):
    """Group reward-decoupled normalisation policy optimisation (arXiv:2601.05242)."""

    config_class = GDPOConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        total = [0.0] * len(samples)
        given = self.config.reward_weights
        found = components(samples, given if isinstance(given, dict) else None)
        weights = weights_by_name(found, given) if found else {}  # nothing where no episode of the step was answered
        for name, rewards in found.items():
            advantages = group_advantages(rewards, samples.group_ids, normalize_std=True, leave_one_out=False)
            total = [so_far + weights[name] * value for so_far, value in zip(total, advantages, strict=True)]
        is_sample = self.config.batch_std == "sample"
        epsilon = 0.0 if is_sample else EPSILON
        return batch_normalized(total, [1.0] * len(samples), unbiased=is_sample, epsilon=epsilon)

    def keep_group(self, group: Sequence[Sample]) -> bool:
        """Whether any component differs: their sum may not."""
        found = [sample.score.components for sample in group if sample.score.valid]
        names = {name for components in found for name in components}
        return any(differ([components.get(name, 0.0) for components in found]) for name in names)


def weights_by_name(names: Collection[str], given: dict[str, float] | tuple[float, ...] | None) -> dict[str, float]:
    """The weight of each component.

    Args:
        names: Of the components, in alphabetical order.
        given: ``reward_weights`` of the config.

    Raises:
        UsageError: A list has another length.

    >>> weights_by_name(["correct", "format"], (1.0, 0.5))
    {'correct': 1.0, 'format': 0.5}
    """
    if isinstance(given, dict):
        return given
    weights = (1.0,) * len(names) if given is None else given
    if len(weights) != len(names):
        raise UsageError(
            f"reward_weights has {len(weights)} entries, and the rewards are {list(names)}",
            fix="give one weight for each, or name them: a mapping",
        )
    return dict(zip(names, weights, strict=True))


def components(samples: Samples, expected: Collection[str] | None = None) -> dict[str, list[float]]:
    """The reward of every sample, component by component; 0 in all of them where the environment gave none.

    Args:
        samples: Scored responses.
        expected: Names of the components. Unset: those of the first response.

    Raises:
        UsageError: a response has other components, or fewer than two.
    """
    answered = [sample.score.components for sample in samples if outcome_of(sample) in ANSWERED]
    names = sorted(expected or (answered[0] if answered else ()))
    for found in map(sorted, answered):
        if len(found) < 2:
            raise UsageError(
                f"GDPO needs at least two rewards per response, the environment gave {len(found)}: {found}",
                fix="return Score(reward, components={'correct': …, 'format': …}), or use `algorithm: grpo`",
            )
        if found != names:
            raise UsageError(
                f"a response has the rewards {found}, expected {names}",
                fix="give every response the same components; reward_weights, where set, must name them all",
            )
    return {name: [sample.score.components.get(name, 0.0) for sample in samples] for name in names}
