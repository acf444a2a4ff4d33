"""How an episode that something else plays has ended, and the score that follows.

Environments that run programs, coroutines or another project's environments tell their episodes' ends by the same five
words, log them under the same metrics, and let the config say what each is worth.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import ConfigIssue, UsageError
from nemorl.metrics import MetricInfo
from nemorl.types import Outcome, Score

Ending = Literal["finished", "crashed", "timeout", "no_calls", "stopped"]
OUTCOMES: tuple[Ending, ...] = ("finished", "crashed", "timeout", "no_calls", "stopped")
Fate = float | Literal["reward", "error"] | None
"""The score of an outcome: a number; ``None`` where nothing is learnt from it; ``reward``: as if it had finished;
``error``: the run ends."""
WORDS: Mapping[Ending, tuple[str, str]] = {
    "finished": ("ended by itself", ""),
    "crashed": ("ended with an error", "anything above 0: read its stderr in the log"),
    "timeout": ("was ended at its deadline", "growth: raise `timeout_s`, or bound the agent's steps"),
    "no_calls": ("ended well and got no answer of the policy", "anything above 0: it may call another server"),
    "stopped": ("gave up at a limit of calls or tokens", "growth: raise `rollouts.max_calls` or the context"),
}
UNSAID: Mapping[Ending, Outcome] = {"timeout": "policy_timeout", "stopped": "truncated"}
"""Ends whose consequence ``rollouts.on_outcome`` decides where the environment's config says none."""
OUTCOME_METRICS: Mapping[str, MetricInfo] = {
    f"train/environment/outcome_{outcome}": MetricInfo(
        "How agents end", "share", f"share of episodes whose agent {words}", watch_for
    )
    for outcome, (words, watch_for) in WORDS.items()
}


def outcome_problems(outcomes: Mapping[str, Fate]) -> Iterator[ConfigIssue]:
    """Names in a config's ``outcomes`` that no episode ends as."""
    mild = [outcome for outcome in OUTCOMES if outcome != "finished"]
    for outcome in outcomes.keys() - set(mild):
        fix = did_you_mean(outcome, mild) or f"use one of {', '.join(mild)}"
        yield ConfigIssue(f"outcomes.{outcome}", f"no episode ends as {outcome!r}", fix)


async def worth(
    outcome: Ending,
    fates: Mapping[str, Fate],
    reward: Callable[[], Awaitable[Score]],
    describe: Callable[[], str],
) -> Score:
    """The score of an episode, its outcome among the metrics.

    Args:
        outcome: How it ended.
        fates: Of the outcomes but ``finished``; 0 where nothing is said.
        reward: Scores it, where its outcome says so.
        describe: How it ended, for an error.

    Raises:
        UsageError: The outcome is an error, as configured.
    """
    fate: Fate = "reward" if outcome == "finished" else fates.get(outcome, 0.0)
    if fate == "error":
        raise UsageError(f"an agent ended as {outcome}: {describe()}", fix=f"mend it, or set outcomes.{outcome}")
    if fate == "reward":
        score = await reward()
    elif fate is None:
        said: Outcome = "environment_timeout" if outcome == "timeout" else "infrastructure"
        score = Score(0.0, valid=False, outcome=said, cause=f"the agent: {outcome}")
    else:
        unsaid = "scored" if outcome in fates else UNSAID.get(outcome, "scored")
        score = Score(float(fate), correct=False, outcome=unsaid)
    ends = {f"outcome_{name}": float(name == outcome) for name in OUTCOMES}
    return replace(score, metrics={**score.metrics, **ends})


class FirstEpisodes:
    """Ends a run whose agents get no answer of the policy: a typo would otherwise train on zeros."""

    def __init__(self, patience: int, *, fix: str) -> None:
        """
        Args:
            patience: First episodes without an answer after which the run ends.
            fix: What the error then advises.
        """
        self._patience, self._fix, self._failed, self._is_over = patience, fix, 0, False
        self._lock = threading.Lock()

    def note(self, answers: int, describe: Callable[[], str]) -> None:
        """
        Args:
            answers: Of the policy, in an episode that has ended.
            describe: How it ended.

        Raises:
            UsageError: It is the last of so many, none of which got an answer.
        """
        with self._lock:
            self._is_over |= answers > 0
            self._failed += 1
            failed = self._failed
        if self._is_over:
            return
        if failed == 1:
            logging.getLogger(__name__).warning("an agent got no answer of the policy: %s", describe())
        if failed >= self._patience:
            raise UsageError(
                f"none of the first {failed} agents got an answer of the policy; the last one: {describe()}",
                fix=self._fix,
            )
