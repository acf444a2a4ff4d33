"""Metrics of the policy-gradient family, as its config classes declare them."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl.metrics import MetricInfo

from nemorl_rl.declared_metrics import ADVANTAGE_METRICS, CORRECTION_METRICS, KL_METRICS, RATIO_METRICS, SAMPLER_METRICS

_DISAGREE = "`max_sequence_error`: "
_DROPPED = "dropped ones in every step: find the cause of the mismatch"

POLICY_GRADIENT_METRICS: Mapping[str, MetricInfo] = {
    "train/baseline_reward/pct_mixed": MetricInfo(
        "Groups by reward",
        "percent",
        "percent of groups with different rewards, of those with several responses: the ones that teach",
        "near 0",
    ),
    "train/baseline_reward/pct_0": MetricInfo(
        "Groups by reward",
        "percent",
        "percent of groups whose mean reward is 0",
        "near 100: the task is too hard, nothing is learnt",
    ),
    "train/baseline_reward/pct_1": MetricInfo(
        "Groups by reward", "percent", "percent of groups whose mean reward is 1", "near 100: too easy"
    ),
    "train/filtered_out_frac": MetricInfo(
        "Filtered-out tokens",
        "share",
        "`filtered_logprobs`: share of trained tokens that the trainer's top-k and top-p leave out",
        "more than a few in a thousand: trainer and sampler differ, or the weights are old",
    ),
    **ADVANTAGE_METRICS,
    **KL_METRICS,
    **RATIO_METRICS,
    **SAMPLER_METRICS,
    **CORRECTION_METRICS,
    "train/entropy": MetricInfo(
        "Entropy of the policy",
        "nats",
        "`entropy_bonus`: entropy of the whole vocabulary at a trained token",
        "a fall to 0, or growth without an end: lower the bonus",
    ),
    "train/old_entropy": MetricInfo(
        "Entropy of the policy", "nats", "`high_entropy_frac`: the same, before the step", "a fall to 0"
    ),
    "train/high_entropy_frac": MetricInfo(
        "Tokens that train", "share", "`high_entropy_frac`: share of tokens that train", "another number than was asked"
    ),
    "train/off_policy_masked_frac": MetricInfo(
        "Tokens that train",
        "share",
        "`off_policy_mask`: share of tokens whose response the policy has left",
        "growth: the samples are too old, or the engines differ",
    ),
    "train/token_staleness": MetricInfo(
        "Age of tokens",
        "updates",
        "`max_token_staleness`: updates between sampling a token and learning from it",
        "growth",
    ),
    "train/stale_masked_frac": MetricInfo(
        "Tokens that train",
        "share",
        "`max_token_staleness`: share of tokens that are too old",
        "more than a few in a hundred: sampling is wasted; raise the bound, or sample faster",
    ),
    "train/sequence_mult_prob_error": MetricInfo(
        "Sampler mismatch of responses",
        meaning=f"{_DISAGREE}mean `token_mult_prob_error` of a response",
        watch_for=_DROPPED,
    ),
    "train/max_sequence_mult_prob_error": MetricInfo(
        "Sampler mismatch of responses",
        meaning=f"{_DISAGREE}largest `token_mult_prob_error` of a response",
        watch_for=_DROPPED,
    ),
    "train/dropped_disagreeing": MetricInfo(
        "Responses dropped for mismatch",
        "responses",
        f"{_DISAGREE}how many responses were left out for it",
        _DROPPED,
    ),
    "train/invalid_tool_call_rate": MetricInfo(
        "Faulty messages", "share", "`message_penalties`: share of messages with a broken tool call", "no fall"
    ),
    "train/malformed_thinking_rate": MetricInfo(
        "Faulty messages", "share", "`message_penalties`: share of messages with broken think tags", "no fall"
    ),
}
