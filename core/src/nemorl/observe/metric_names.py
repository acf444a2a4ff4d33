"""Names under which metrics are logged, as docs/metrics.md explains them: for suggestions, and for names that cannot
occur. Environments, algorithms and hooks may log others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from nemorl.reading import shown
from nemorl.suggest import did_you_mean

PREFIXES = ("train/", "validation/", "timing/", "performance/")
TYPO_LIKENESS = 0.85
"""How alike a name must be to a known one to count as a slip of it."""
_TRAIN = (
    "loss grad_norm lr skipped_updates global_valid_toks global_valid_seqs total_num_tokens reward accuracy",
    "mean_prompt_length mean_gen_tokens_per_sample max_gen_tokens_per_sample mean_total_tokens_per_sample",
    "natural_termination_rate truncation_rate avg_turns_per_sample advantages/mean baseline_reward/pct_0",
    "baseline_reward/pct_1 baseline_reward/pct_mixed kl_penalty token_mult_prob_error gen_kl_error",
    "approx_entropy critic/loss critic/explained_var",
    "preference_loss sft_loss center_loss rewards_chosen_mean rewards_rejected_mean rewards_margin_mean",
    "forward_kl reverse_kl",
)
_VALIDATION = (
    "accuracy reward avg_length truncation_rate avg_turns val_loss reverse_kl loss",
    "preference_loss sft_loss center_loss rewards_chosen_mean rewards_rejected_mean rewards_margin_mean",
)
KNOWN = frozenset(
    {f"train/{name}" for line in _TRAIN for name in line.split()}
    | {f"validation/{name}" for line in _VALIDATION for name in line.split()}
    | {"performance/tokens_per_sec", "performance/samples_per_sec", "timing/train/total_step_time"}
)
_AT_K = re.compile(r"validation/(pass|cons)@[1-9]\d*")


def metric_problem(name: str, *, validates: bool, has_hooks: bool) -> tuple[str, str] | None:
    """Why a run will not log a metric of this name, and what to write; ``None`` where it may.

    Args:
        name: Full name, e.g. ``validation/accuracy``.
        validates: The run validates at some time.
        has_hooks: Plugins are called back, which may log under names of their own.
    """
    if name.startswith("validation/") and not validates:
        return f"{shown(name)} never occurs: this run does not validate", "set validation.every or validation.at_end"
    if name in KNOWN or _AT_K.fullmatch(name):
        return None
    same_ending = sorted(known for known in KNOWN if known.partition("/")[2] == name)
    if not name.startswith(PREFIXES) and not has_hooks:
        guess = f"Did you mean {same_ending[-1]!r}?" if same_ending else did_you_mean(name, KNOWN)
        return f"no metric is called {shown(name)}", guess or f"names begin with {', '.join(PREFIXES)}"
    guess = did_you_mean(name, KNOWN, likeness=TYPO_LIKENESS)
    return (f"no metric is called {shown(name)}", guess) if guess else None


class MetricWatch:
    """A hook that says so when the metric that ranks checkpoints has not occurred by the end."""

    def __init__(self, metric: str | None, warn: Callable[[str], None]) -> None:
        self._metric, self._warn = metric, warn

    def on_fit_end(self, trainer: Any) -> None:
        names = set().union(*(record.keys() for record in trainer.history))
        if self._metric is None or self._metric in names or not names:
            return
        closest = did_you_mean(self._metric, names) or "The newest checkpoint counts as the best."
        self._warn(f"checkpoint.metric: the run logged no {shown(self._metric)}. {closest}")
