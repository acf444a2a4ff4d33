"""How episodes end, and what is learnt from each end: one table for all environments and algorithms.

Who caused an end is said once, where it happens: an environment says so in its ``Score``, the pool and the agents'
driver for time-outs and errors (``environments.faults``), the sampler for the token limit. Everything after that, from
baselines to validation, reads ``Score.valid``, ``Score.reward`` and ``Score.outcome``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from nemorl.config.base import Config
from nemorl.errors import ConfigIssue
from nemorl.metrics import Mean, Metric
from nemorl.types import Outcome, Sample
from pydantic import Field

Fate = float | Literal["lowest", "drop", "refill", "partial"]
"""The consequence of an end: this reward; the lowest reward of the group, at most 0; no verdict at all; the same after
other samples were asked for; the reward that the environment gave."""

FAILURES: frozenset[Outcome] = frozenset({"environment_timeout", "infrastructure"})
"""Ends that say that something failed, and nothing about the policy."""


class OutcomeTable(Config):
    """What is learnt from episodes that end otherwise than with a verdict (``rollouts.on_outcome``).

    A number is the reward of such an episode. ``lowest``: the lowest reward of its group, and at most 0. ``drop``: it
    trains nothing, and no baseline, spread or mean counts it. ``refill``: another sample is asked for in its place, up
    to ``max_refills`` times; then it is dropped. ``partial``: what the environment gave until then.

    Example:
        >>> OutcomeTable(infrastructure="refill", policy_timeout=-1.0).environment_timeout
        'drop'
    """

    truncated: Fate = "partial"
    """The token limit, or that of an agent's calls, cut it."""
    policy_timeout: Fate = "lowest"
    """Late by what the policy did: it generated too long, or what it wrote ran too long. Dropping these would let a
    policy escape a bad reward by stalling."""
    environment_timeout: Fate = "drop"
    """Late by the environment's own doing."""
    infrastructure: Fate = "drop"
    """A sandbox, an engine, a judge, a reset or a connection failed."""
    refused: Fate = "lowest"
    """A request of the policy's was refused, which ended it."""
    cancelled: Fate = "drop"
    """Given up from outside."""
    censored: Literal["upper"] | None = None
    """Experimental. ``upper``: the reward of an ``environment_timeout``, a number or ``partial``, is the most that the
    episode could have earned. It gets what its group's verdicts at or below that say is to be expected. Only for
    advantages that are linear in the rewards of a group. Unset: the reward is what it earned."""
    max_refills: int = Field(2, ge=0, le=100)
    """``refill``: times that one episode is asked for again."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        for outcome in OUTCOMES[1:]:
            fate = self.fate(outcome)
            if isinstance(fate, float) and not math.isfinite(fate):
                yield ConfigIssue(outcome, f"{fate} is no reward", "give a number, drop, refill, lowest or partial")
        if (
            self.censored is not None
            and isinstance(self.environment_timeout, str)
            and self.environment_timeout != "partial"
        ):
            message = f"environment_timeout: {self.environment_timeout} has no reward that could be a bound"
            yield ConfigIssue("censored", message, "set environment_timeout: partial, or the most that can be earned")
        if "refill" in map(self.fate, OUTCOMES) and not self.max_refills:
            yield ConfigIssue("max_refills", "0 refills nothing", "raise it, or say drop in place of refill")

    def fate(self, outcome: Outcome) -> Fate:
        """Of an episode that ended so; what has a verdict keeps it."""
        fates: Mapping[Outcome, Fate] = {
            "scored": "partial",
            "truncated": self.truncated,
            "policy_timeout": self.policy_timeout,
            "environment_timeout": self.environment_timeout,
            "infrastructure": self.infrastructure,
            "refused": self.refused,
            "cancelled": self.cancelled,
        }
        return fates[outcome]

    def wants_another(self, sample: Sample) -> bool:
        """Whether another sample is to be asked for in its place."""
        return self.fate(outcome_of(sample)) == "refill"

    def settled(self, group: Sequence[Sample]) -> list[Sample]:
        """The samples of one prompt, each with the verdict that its end deserves.

        Example:
            >>> from nemorl.types import Prompt, Score
            >>> def ended(reward: float, outcome: Outcome) -> Sample:
            ...     score = Score(reward, outcome=outcome)
            ...     return Sample(Prompt(0, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), score, "2", "stop")
            >>> group = [ended(-1.0, "scored"), ended(0.0, "policy_timeout"), ended(0.0, "infrastructure")]
            >>> [(one.reward, one.score.valid) for one in OutcomeTable().settled(group)]
            [(-1.0, True), (-1.0, True), (0.0, False)]
        """
        from nemorl_rl.agents.seats import rewards_of

        kept = [one.score for one in group if one.score.valid and self.fate(outcome_of(one)) == "partial"]
        judged = [reward for score in kept for reward in rewards_of(score)]
        lowest = min([0.0, *judged])
        settled = [self._settled(sample, lowest) for sample in group]
        return settled if self.censored is None else _with_expected_rewards(settled)

    def _settled(self, sample: Sample, lowest: float) -> Sample:
        score, outcome = sample.score, outcome_of(sample)
        fate = self.fate(outcome)
        if fate in ("drop", "refill"):
            score = replace(score, valid=False)
        elif fate != "partial":
            reward = lowest if fate == "lowest" else float(fate)
            sample = rescored(sample, reward, components={}, correct=False, valid=True)
            score = sample.score
        if score.outcome != outcome:
            score = replace(score, outcome=outcome)
        return sample if score is sample.score else replace(sample, score=score)


def rescored(sample: Sample, reward: float, **changes: Any) -> Sample:
    """An episode with another reward as a whole: none of its seats and turns has one of its own any more.

    Args:
        sample: The episode.
        reward: In place of what it earned.
        **changes: Other fields of its score.
    """
    from nemorl_rl.agents.seats import as_one  # which agents need, and configs do not

    score = replace(as_one(sample.score), reward=reward, turn_rewards=(), **changes)
    branches = tuple(replace(branch, turn_rewards=()) for branch in sample.branches)
    return replace(sample, score=score, turn_rewards=(), branches=branches)


def _with_expected_rewards(group: Sequence[Sample]) -> list[Sample]:
    """Those of ``environment_timeout`` take their reward for a bound; ``reward_bound`` of their metrics says it."""
    judged = [one for one in group if one.score.valid]
    known = [one.reward for one in judged if one.score.outcome != "environment_timeout"]
    bounds = [one.reward for one in judged if one.score.outcome == "environment_timeout"]
    expected = iter(expected_below(known, bounds))

    def uncensored(sample: Sample) -> Sample:
        score = sample.score
        if not score.valid or score.outcome != "environment_timeout":
            return sample
        metrics = {**score.metrics, "reward_bound": score.reward}
        return rescored(sample, next(expected), components={}, metrics=metrics)

    return [uncensored(sample) for sample in group]


OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


def outcome_of(sample: Sample) -> Outcome:
    """How an episode ended: as its score says, or at the token limit. An environment that has no verdict and names no
    failure abstains, which is no failure.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> outcome_of(Sample(Prompt(0, "", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(0.0), "2", "length"))
        'truncated'
    """
    if sample.score.outcome == "scored" and sample.truncated:
        return "truncated"
    return sample.score.outcome


def outcome_metrics(samples: Sequence[Sample], advantages: Sequence[float] | None = None) -> dict[str, Metric]:
    """Shares of a step's episodes, and of its gradient, by outcome: of those that occurred.

    Args:
        samples: Settled.
        advantages: One per sample. The share of an outcome in ``sum |advantage| * tokens``, the size of the surrogate's
            gradient before clipping and weights, is then told as well.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> late = Score(0.0, outcome="environment_timeout", valid=False)
        >>> one = Sample(Prompt(0, "", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(1.0), "2", "stop")
        >>> found = outcome_metrics([one, replace(one, score=late)], [1.0, 0.0])
        >>> found["outcome/environment_timeout"].value, found["outcome_gradient/environment_timeout"].value
        (0.5, 0.0)
    """
    outcomes = [outcome_of(sample) for sample in samples]
    occurred = [outcome for outcome in OUTCOMES if outcome in outcomes]
    metrics: dict[str, Metric] = {f"outcome/{name}": Mean.of(each == name for each in outcomes) for name in occurred}
    if advantages is not None:
        sizes = [abs(a) * sample.response_tokens for a, sample in zip(advantages, samples, strict=True)]
        total = math.fsum(sizes)
        for name in occurred:
            own = math.fsum(size for size, each in zip(sizes, outcomes, strict=True) if each == name)
            metrics[f"outcome_gradient/{name}"] = Mean(own / total if total else 0.0)
    return metrics


def failed_share(samples: Sequence[Sample]) -> float:
    """Of the episodes that failed without the policy's doing."""
    return sum(outcome_of(sample) in FAILURES for sample in samples) / max(1, len(samples))


def failure_causes(samples: Sequence[Sample]) -> str:
    """The three most frequent failures in words, e.g. ``infrastructure 6 (reset: ConnectionError: node3 refused)``."""
    found = Counter((outcome_of(one), one.score.cause) for one in samples if outcome_of(one) in FAILURES)
    return ", ".join(
        f"{outcome} {count}" + (f" ({cause})" if cause else "") for (outcome, cause), count in found.most_common(3)
    )


def expected_below(rewards: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """What is to be expected of rewards that are at most their bounds.

    r_i = mean of { rewards <= bound_i } and { r_j : bound_j < bound_i };  bound_i where there are none

    These are the conditional expectations E[R | R <= bound_i] under the Kaplan-Meier distribution of the group, which
    Efron builds by sharing the mass of a censored value among those beyond it (The two sample problem with censored
    data, 1967), and which Buckley and James put in the place of censored values (Biometrika 66, 1979).
    Differs from the sources: mirrored, since bounds are from above; a reward equal to a bound counts as below it; no
    covariates, so one pass is the fixed point.

    Args:
        rewards: Those that are known.
        bounds: One for each that is not.

    Returns:
        One reward per bound, in input order, each at most its bound.

    Example:
        >>> expected_below([0.0, 0.5, 1.0], [0.75, 0.25])  # (0 + 0.5 + 0) / 3, and 0 alone
        [0.16666666666666666, 0.0]
    """
    imputed: dict[float, float] = {}
    for bound in sorted(set(bounds)):
        lower = [value for value in bounds if value < bound]
        values = [*(reward for reward in rewards if reward <= bound), *(imputed[value] for value in lower)]
        imputed[bound] = math.fsum(values) / len(values) if values else bound
    return [imputed[bound] for bound in bounds]
