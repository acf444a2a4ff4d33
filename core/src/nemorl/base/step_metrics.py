"""Declarations of the metrics that steps of every algorithm have."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl.metrics import MetricInfo

STEP_METRICS: Mapping[str, MetricInfo] = {
    "train/loss": MetricInfo(
        "Loss",
        meaning="the loss of the step; its scale depends on the algorithm, and in reinforcement learning its trend "
        "alone says little",
        watch_for="NaN, or sudden jumps beside a growing gradient norm: lower the learning rate",
        smooth=True,
    ),
    "train/grad_norm": MetricInfo(
        "Gradient norm",
        meaning="global gradient norm before clipping to `policy.max_grad_norm`",
        watch_for="growth over many steps, or far above `policy.max_grad_norm` throughout: updates are mostly clipped",
        smooth=True,
    ),
    "train/lr": MetricInfo("Learning rate", meaning="learning rate of the last optimizer step"),
    "train/skipped_updates": MetricInfo(
        "Skipped updates",
        "share",
        "share of optimizer steps whose gradient was not finite and that changed nothing",
        "anything above 0 for several steps: the loss overflows",
    ),
    "train/global_valid_toks": MetricInfo("Tokens per update", "tokens", "tokens trained on, per optimizer step"),
    "train/global_valid_seqs": MetricInfo(
        "Sequences per update", "sequences", "sequences with at least one such token, per optimizer step"
    ),
    "train/total_num_tokens": MetricInfo(
        "Tokens per step", "tokens", "tokens of all sequences of the step, prompts included"
    ),
    "performance/tokens_per_sec": MetricInfo(
        "Throughput",
        "tokens per second",
        "`total_num_tokens` per second of the step",
        "a fall that longer responses do not explain",
    ),
    "performance/samples_per_sec": MetricInfo(
        "Samples per second",
        "samples per second",
        "responses (of algorithms that do not sample: rows) per second of the step",
    ),
    "timing/train/total_step_time": MetricInfo("Step", "seconds", "the whole step"),
    "timing/train/policy_training": MetricInfo("Policy training", "seconds", "forward, backward, optimizer"),
    "timing/train/data_processing": MetricInfo("Data processing", "seconds", "reading and encoding the rows"),
    "timing/train/checkpointing": MetricInfo(
        "Checkpoint", "seconds", "the time that training stood still for the checkpoint after the step before"
    ),
    "timing/train/checkpointing/wait": MetricInfo(
        "Waiting for a checkpoint",
        "seconds",
        "the part of it that passed until the asynchronous checkpoint before was on disk",
        "more than 0: checkpoints are due faster than the disk takes them",
    ),
    "timing/validation/total_validation_time": MetricInfo("Validation", "seconds", "a whole validation"),
}
