"""The rules whose limits are keys of ``rollouts``: steps that teach nothing, and a sampler that is not the policy.

A dead environment scores every response 0, and a run that goes on learns nothing for days. So does one whose groups all
have equal rewards: their advantages are 0. Gradients assume that what was sampled came from the policy that is trained;
only log-probs tell when it did not. :mod:`nemorl_tensors.mismatch` defines the distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from nemorl.config.base import Config
from nemorl.errors import BackendError, DeadlineError, NemorlError
from nemorl.plugins import registry
from nemorl.types import Sample

from nemorl_rl.alerts.rules import Rule
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.rollouts.outcomes import FAILURES, failed_share, failure_causes, outcome_of
from nemorl_rl.serving.sampler_precision import lower_precision

MISMATCH = "token_mult_prob_error"
"""The metric that is watched: mean exp(|old - generation log-prob|), 1.0 when the engines agree."""

CAUSES = (
    "another precision or other kernels on one side: compare with policy.precision float32, generation without fp8",
    "older weights: an update that did not reach the sampler",
    "an output head tied to the embeddings, of which the sampler still uses an old copy",
    "the temperature applied on one side only",
    "log-probs that the sampler renormalised over top-p, top-k or min-p",
    "another revision of the model or its tokenizer in the sampler",
    "an architecture that the sampler computes otherwise or cannot update: docs/backends/architectures.md",
)
"""Causes of a mismatch that have been seen, most frequent first."""

FAILED_FRAC, EQUAL_FRAC = "rollouts/failed_frac", "rollouts/equal_frac"
"""Shares of a step's episodes that failed, and of its groups whose rewards are all the same: judged, not logged."""

SOME_FAILED = 0.05
"""Share of failed episodes above which a run says so, and where."""
FAILED_METRIC = "environment_error"
"""Metric of a score by which an environment says that a service of its failed, and that it scored 0 all the same."""


class RolloutRule(Rule):
    """A rule that ``rollouts`` sets, with words of its own."""

    set_by: str
    """Key of its limits; ``alerts.rules`` says no more than what follows when it holds."""
    words: str
    """The event in words, with places for ``{step}``, ``{value}`` and what the record has."""
    error_class: type[NemorlError] = BackendError
    """Of the error that ends the run."""

    def finding(self, metric: str, step: int, value: float, record: Mapping[str, Any]) -> str:
        return self.words.format(**{**record, "step": step, "value": value})

    def error(self, finding: str) -> NemorlError:
        error = super().error(finding)
        return self.error_class(error.message, fix=error.fix)


def rollout_rules(run: Config) -> Iterator[tuple[str, Rule]]:
    """Name and rule, as the config of a run sets them; none for runs that do not sample."""
    if not isinstance(run, RolloutRunConfig):
        return
    settings, breaker = run.rollouts, run.rollouts.breaker
    if settings.mismatch_limit is not None:
        remedy = "Remove the cause, raise rollouts.mismatch_limit, or set it to null to be warned only"
        rule = _mismatch_rule(run, "mismatch_limit", settings.mismatch_limit)
        ends = {"at_start": True, "severity": "error", "action": "fail", "remedy": remedy}
        yield "sampler_mismatch_at_start", rule.model_copy(update=ends)
    remedy = "What cannot be removed, `importance_correction` can weigh in algorithms that have it"
    rule = _mismatch_rule(run, "mismatch_warning", settings.mismatch_warning)
    yield "sampler_mismatch", rule.model_copy(update={"remedy": remedy})
    yield "some_episodes_failed", RolloutRule(
        metric=FAILED_FRAC, above=SOME_FAILED, set_by="rollouts.on_outcome",
        words="{value:.0%} of the episodes of step {step} failed without the policy's doing: {causes}",
        remedy="They train nothing; rollouts.on_outcome asks for others in their place (`refill`), or gives them a "
        "score where the policy can provoke them",
    )  # fmt: skip
    if breaker.failed_steps:
        yield "failed_episodes", RolloutRule(
            metric=FAILED_FRAC, at_least=breaker.failed_frac, patience=breaker.failed_steps,
            set_by="rollouts.breaker", severity="error", action="fail", error_class=DeadlineError,
            words="{value:.0%} of the episodes of step {step} failed without the policy's doing, and as much in "
            f"{breaker.failed_steps} steps in a row: {{causes}}",
            remedy="See whether what it needs is up and fast enough (rollouts.environment_timeout_s); "
            "rollouts.breaker.failed_steps: 0 goes on regardless",
        )  # fmt: skip
    if breaker.equal_steps:
        yield "few_mixed_groups", RolloutRule(
            metric=EQUAL_FRAC, at_least=breaker.equal_frac, patience=breaker.equal_steps,
            set_by="rollouts.breaker", action="fail" if breaker.on_equal == "stop" else "warn",
            words=f"in {{value:.0%}} of the groups of step {{step}}, and as many of {breaker.equal_steps} steps in a "
            "row, all responses have one reward (they are from {lowest:g} to {highest:g}): nothing is learned",
            remedy="Look at the responses (`nemorl view samples RUN`): tasks too hard or too easy, a grader that finds "
            "none, too few samples per prompt; rollouts.breaker sets when this is said",
        )  # fmt: skip


def _mismatch_rule(run: RolloutRunConfig, key: str, limit: float) -> RolloutRule:
    """Of steps all of whose samples are from the newest weights: with older ones, weights differ as well as engines."""
    lower = lower_precision(run.generation.backend)
    rounding = "" if lower is None else f"The sampler computes in {lower}, which is part of it. "
    likely = f"{rounding}{likely_causes()}\nTo measure the engines alone: {audit_command(run)}"
    return RolloutRule(
        metric=f"train/{MISMATCH}", above=limit, unless="train/max_trajectory_age", set_by=f"rollouts.{key}",
        words=f"trainer and sampler disagree about the tokens of step {{step}}: {MISMATCH} is {{value:.4g}}, above "
        f"rollouts.{key} = {limit:g}. " + likely.replace("{", "{{").replace("}", "}}"),
    )  # fmt: skip


def rollout_record(samples: Sequence[Sample], failed_frac: float) -> dict[str, Any]:
    """The values that the rules judge of a step's samples before anything is learnt from them.

    Args:
        samples: Of one step, those of a prompt side by side.
        failed_frac: From this share of failed episodes on, their equal rewards say nothing of the task.
    """
    said = [s for s in samples if outcome_of(s) not in FAILURES and s.score.metrics.get(FAILED_METRIC, 0.0) > 0]
    failed = failed_share(samples) + len(said) / max(1, len(samples))
    rewards = [sample.reward for sample in samples if sample.score.valid] or [0.0]
    return {
        FAILED_FRAC: failed,
        "causes": failure_causes(samples) or "the environment says no more",
        EQUAL_FRAC: 0.0 if failed >= failed_frac else _equal_share(samples),
        "lowest": min(rewards),
        "highest": max(rewards),
    }


def _equal_share(samples: Sequence[Sample]) -> float:
    """Of the groups of two and more that could be scored, those whose rewards are all the same; 0 without any."""
    judged = [sample for sample in samples if sample.score.valid]
    groups = [list(group) for _, group in groupby(judged, key=lambda sample: sample.prompt.index)]
    compared = [[sample.reward for sample in group] for group in groups if len(group) > 1]
    equal = sum(math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12) for rewards in compared)
    return equal / len(compared) if compared else 0.0


def likely_causes() -> str:
    """The list of causes, one line each, for people."""
    return "Likely causes:" + "".join(f"\n  - {cause}" for cause in CAUSES)


def audit_command(config: RolloutRunConfig) -> str:
    """The command that measures the engines of a run outside it."""
    policy, generation = config.policy, config.generation
    trainer = registry().name_of("training_backends", type(policy.backend))
    sampler = registry().name_of("generation_backends", type(generation.backend))
    return (
        f"nemorl doctor --model {policy.model_name} --training {trainer} --generation {sampler} "
        f"--precision {policy.precision} generation.temperature={generation.temperature}"
    )
