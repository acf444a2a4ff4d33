"""Where two runs of the same seed part first, and which of their differences could be why.

A step computes one thing after the other: prompts, responses, rewards, the loss, the update. What parts first in the
first step cannot come from a setting that takes effect later; from the second step on, an update came before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemorl_cli.report.comparing.variants import CODE, Difference, Variant
from nemorl_cli.report.run_data import RunData

STAGES = ("data", "generation", "rewards", "loss", "update")
"""Parts of a step, in the order in which it computes them."""
METRICS: Mapping[str, str] = {
    "train/mean_prompt_length": "data",
    "train/mean_gen_tokens_per_sample": "generation",
    "train/max_gen_tokens_per_sample": "generation",
    "train/truncation_rate": "generation",
    "train/total_num_tokens": "generation",
    "train/avg_turns_per_sample": "generation",
    "train/token_mult_prob_error": "generation",
    "train/reward": "rewards",
    "train/accuracy": "rewards",
    "train/advantages/mean": "loss",
    "train/advantages/max": "loss",
    "train/kl_penalty": "loss",
    "train/loss": "loss",
    "train/grad_norm": "update",
    "train/lr": "update",
}
KEYS: Sequence[tuple[str, str]] = (
    ("data", "data"),
    ("num_prompts_per_step", "data"),
    ("shuffle", "data"),
    ("model", "generation"),
    ("policy.model_name", "generation"),
    ("policy.init", "generation"),
    ("policy.tokenizer", "generation"),
    ("policy.hf_config_overrides", "generation"),
    ("policy.max_sequence_tokens", "generation"),
    ("policy.precision", "generation"),
    ("generation", "generation"),
    ("rollouts", "generation"),
    ("num_generations_per_prompt", "generation"),
    ("max_turns", "generation"),
    ("dynamic_sampling", "generation"),
    ("environment", "rewards"),
    ("policy", "update"),
    ("num_minibatches", "update"),
    ("num_epochs_per_rollout", "update"),
)
"""Where a key takes effect first, the first match counting; others are the algorithm's own: ``loss``."""
PLUGIN_KINDS: Mapping[str, str] = {
    "datasets": "data",
    "generation_backends": "generation",
    "weight_transports": "generation",
    "environments": "rewards",
    "algorithms": "loss",
    "training_backends": "update",
}
GIVEN: Mapping[str, str] = {"the training rows": "data", "the first weights": "generation"}
"""Where rows and first weights take effect; rows to validate on do so in no part of a step."""
TURNS = "train/avg_turns_per_sample"
AGENTS = "train/environment/outcome_"
"""Metrics that tell that an environment talks to the policy, or drives it."""
TOLERANCE = 1e-6
"""Relative; less is rounding."""


@dataclass(frozen=True)
class Parting:
    """The first difference between two runs of one seed."""

    step: int
    stage: str
    metric: str
    first: float
    second: float


@dataclass(frozen=True)
class Causes:
    """Possible causes of a difference between two variants."""

    parting: Parting | None
    """``None``: no two runs of one seed, or they agree in all that they have in common."""
    likely: Sequence[Difference]
    possible: Sequence[Difference]
    unlikely: Sequence[Difference]
    """Takes effect after the runs had parted, or changes no result."""


def causes(first: Variant, second: Variant, found: Sequence[Difference]) -> Causes:
    """Sort the differences of two variants by how well they explain where their runs part."""
    parting = first_parting(first, second)
    neutral = [difference for difference in found if difference.is_neutral]
    serious = [difference for difference in found if not difference.is_neutral]
    if parting is None:
        return Causes(None, [], serious, neutral)
    wanted = {parting.stage} if parting.step == 1 else {parting.stage, "update"}
    too_late = STAGES[STAGES.index(parting.stage) + 1 :] if parting.step == 1 else ()
    stages = {id(difference): stage_of(difference, first, second) for difference in serious}
    return Causes(
        parting,
        [one for one in serious if stages[id(one)] in wanted],
        [one for one in serious if stages[id(one)] not in wanted and stages[id(one)] not in too_late],
        [*(one for one in serious if stages[id(one)] in too_late), *neutral],
    )


def first_parting(first: Variant, second: Variant) -> Parting | None:
    """The first step, and the first part of it, at which two runs of one seed differ."""
    alike = ((a, b) for a in first.runs for b in second.runs if a.config.get("seed") == b.config.get("seed"))
    return next(filter(None, (_parting(*pair) for pair in alike)), None)


def _parting(one: RunData, other: RunData) -> Parting | None:
    names = [name for name in METRICS if one.metrics.get(name) and other.metrics.get(name)]
    names += [name for name in one.metrics if name.startswith("train/reward/") and name in other.metrics]
    steps = sorted({step for name in names for step in one.metrics[name].keys() & other.metrics[name].keys()})
    for step in steps:
        for stage in STAGES:
            for name in names:
                values = one.metrics[name].get(step), other.metrics[name].get(step)
                if METRICS.get(name, "rewards") == stage and None not in values and not _is_equal(*values):
                    return Parting(step, stage, name, *values)  # type: ignore[arg-type]
    return None


def _is_equal(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)


def _environment_stage(*variants: Variant) -> str:
    """Where environments take effect first: they shape what is sampled where they talk to the policy or drive it."""
    named = {name for variant in variants for name in variant.runs[0].metrics}
    turns = [run.metrics.get(TURNS, {}) for variant in variants for run in variant.runs]
    talks = any(value > 1 for run in turns for value in run.values())
    return "generation" if talks or any(name.startswith(AGENTS) for name in named) else "rewards"


def stage_of(difference: Difference, first: Variant, second: Variant) -> str | None:
    """Where in a step a difference takes effect first; ``None`` for what may do so anywhere, such as a library."""
    if difference.key == "plugin":
        name = str(difference.second).partition(" ")[0].rstrip(":")
        plugins = [*(first.plugins or ()), *(second.plugins or ())]
        kinds = {part.partition(":")[0] for plugin in plugins if plugin.distribution == name for part in plugin.parts}
        stage = next((stage for kind, stage in PLUGIN_KINDS.items() if kind in kinds), None)
        return _environment_stage(first, second) if stage == "rewards" else stage
    if difference.key.startswith("environment.") and difference.key.split(".")[1] in ("libraries", "git", "python"):
        return None
    if difference.key.startswith("the ") and not difference.key.startswith(CODE):
        return GIVEN.get(difference.key.partition(" of ")[0])
    keys = ((key, stage) for key, stage in KEYS if difference.key == key or difference.key.startswith(f"{key}."))
    key, stage = next(keys, ("", "loss"))
    is_of_environment = key == "environment" or difference.key.startswith(CODE)
    return _environment_stage(first, second) if is_of_environment else stage
