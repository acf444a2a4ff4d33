"""The parts of a training step in the order in which it computes them, and what a run's files say of each.

A difference in a later part follows from one in an earlier part, so the first one is the one to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal["data", "tokens", "rewards", "advantages", "logprobs", "loss", "gradient", "weights", "validation"]
STAGES: Mapping[Stage, str] = {
    "data": "prompts",
    "tokens": "sampled tokens",
    "rewards": "rewards",
    "advantages": "advantages",
    "logprobs": "log-probs of the trainer",
    "loss": "loss",
    "gradient": "gradient norm",
    "weights": "update and weights",
    "validation": "validation",
}
"""In order, with what they are called."""

METRICS: Mapping[str, Stage] = {
    "train/mean_prompt_length": "data",
    "train/mean_gen_tokens_per_sample": "tokens",
    "train/max_gen_tokens_per_sample": "tokens",
    "train/mean_total_tokens_per_sample": "tokens",
    "train/total_num_tokens": "tokens",
    "train/truncation_rate": "tokens",
    "train/natural_termination_rate": "tokens",
    "train/avg_turns_per_sample": "tokens",
    "train/num_samples": "tokens",
    "train/sampled_sequences": "tokens",
    "train/sampled_checksum": "tokens",
    "train/num_valid_samples": "rewards",
    "train/reward": "rewards",
    "train/accuracy": "rewards",
    "train/token_mult_prob_error": "logprobs",
    "train/gen_kl_error": "logprobs",
    "train/sampling_importance_ratio": "logprobs",
    "train/approx_entropy": "logprobs",
    "train/kl_penalty": "loss",
    "train/grad_norm": "gradient",
    "train/lr": "weights",
    "train/skipped_updates": "weights",
}
PREFIXES: Mapping[str, Stage] = {
    "train/reward/": "rewards",
    "train/environment/": "rewards",
    "train/advantages/": "advantages",
    "train/baseline_reward/": "advantages",
    "train/logprob_error/": "logprobs",
    "train/probs_ratio": "loss",
    "validation/": "validation",
}
"""Metrics that are not named here, such as seconds and memory, are not compared."""


def stage_of_metric(name: str) -> Stage | None:
    """The part of a step that a metric is about; ``None`` for what says nothing of its result.

    >>> stage_of_metric("train/critic/value_loss"), stage_of_metric("timing/train/generation")
    ('loss', None)
    """
    if name in METRICS:
        return METRICS[name]
    for prefix, stage in PREFIXES.items():
        if name.startswith(prefix):
            return stage
    return "loss" if name.startswith("train/") and name.endswith("loss") else None


KnownBy = Literal["records", "checkpoint", "metrics", "nothing"]


@dataclass(frozen=True)
class Point:
    """A value that two runs have in common and that differs."""

    quantity: str
    """A column of the records, a metric or a tensor."""
    first: Any
    second: Any
    sample: str | None = None
    """``sample_id`` of the record, where it is in one."""
    token: int | None = None
    """Its place in the token sequence, where it belongs to a token."""
    detail: str = ""
    """More about it, in words."""


@dataclass(frozen=True)
class Finding:
    """One part of one step of two runs."""

    step: int
    stage: Stage
    known_by: KnownBy
    """The best that both have. Metrics are means: samples may differ where they agree."""
    point: Point | None = None
    """The first difference. ``None``: none is known."""
    lacking: str | None = None
    """Why it is not known exactly, where it is not."""

    @property
    def is_exact(self) -> bool:
        return self.lacking is None
