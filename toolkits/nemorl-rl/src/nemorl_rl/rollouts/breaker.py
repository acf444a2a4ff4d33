"""A circuit breaker: steps that teach nothing, one after the other, end the run or are warned of.

A dead environment scores every response 0, and a run that goes on learns nothing for days. So does one whose groups all
have equal rewards: their advantages are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from nemorl.errors import BackendError, DeadlineError, NemorlError
from nemorl.types import Sample, Samples

from nemorl_rl.config import BreakerConfig

FAILED = frozenset({"environment_timeout", "episode_timeout", "environment_error"})
"""Metrics of a score that say that the environment did not do its part. The pool counts the time-outs; environments
that score 0 where a service of theirs fails may count ``environment_error``."""


class CircuitBreaker:
    """A hook object that counts steps in a row of which too large a share failed, or has equal rewards."""

    essential = True

    def __init__(self, settings: BreakerConfig, warn: Callable[[str], None], record: Callable[..., None]) -> None:
        """
        Args:
            settings: Shares, counts and what to do.
            warn: Told of what does not end the run.
            record: Writes an event: its name, and facts by keyword.
        """
        self._settings, self._warn, self._record = settings, warn, record
        self._failed_steps = self._equal_steps = 0

    def on_rollout_end(self, step: int, samples: Samples) -> None:
        settings = self._settings
        share = sum(map(_has_failed, samples)) / max(1, len(samples))
        self._failed_steps = self._failed_steps + 1 if share >= settings.failed_frac else 0
        if settings.failed_steps and self._failed_steps >= settings.failed_steps:
            self._record("circuit_breaker", step=step, reason="failed_episodes", steps=self._failed_steps, share=share)
            raise DeadlineError(
                f"the environment failed in {share:.0%} of the episodes of step {step}, and as much in "
                f"{self._failed_steps} steps in a row",
                fix="see whether what it needs is up and fast enough (rollouts.environment_timeout_s); "
                "rollouts.breaker.failed_steps: 0 goes on regardless",
            )
        # A step of failed episodes has equal rewards as well, and says nothing of the task.
        equal = 0.0 if share >= settings.failed_frac else _equal_share(samples)
        self._equal_steps = self._equal_steps + 1 if equal >= settings.equal_frac else 0
        if settings.equal_steps and self._equal_steps == settings.equal_steps:
            self._record("circuit_breaker", step=step, reason="equal_rewards", steps=self._equal_steps, share=equal)
            error = self._equal_error(step, equal, samples)
            if settings.on_equal == "stop":
                raise error
            self._warn(str(error))

    def _equal_error(self, step: int, share: float, samples: Sequence[Sample]) -> NemorlError:
        rewards = [sample.reward for sample in samples]
        return BackendError(
            f"in {share:.0%} of the groups of step {step}, and as many of {self._equal_steps} steps in a row, all "
            f"responses have one reward (they are from {min(rewards):g} to {max(rewards):g}): nothing is learned",
            fix="look at the responses (`nemorl view samples RUN`): tasks too hard or too easy, a grader that finds "
            "none, too few samples per prompt; rollouts.breaker sets when this is said",
        )


def _has_failed(sample: Sample) -> bool:
    metrics: Mapping[str, Any] = sample.score.metrics
    return any(metrics.get(name, 0.0) > 0 for name in FAILED)


def _equal_share(samples: Sequence[Sample]) -> float:
    """Of the groups of two and more that could be scored, those whose rewards are all the same; 0 without any."""
    judged = [sample for sample in samples if sample.score.valid]
    groups = [list(group) for _, group in groupby(judged, key=lambda sample: sample.prompt.index)]
    compared = [[sample.reward for sample in group] for group in groups if len(group) > 1]
    equal = sum(math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12) for rewards in compared)
    return equal / len(compared) if compared else 0.0
