"""Metrics of the hook ``efficiency``: rates from a step's seconds and tokens, waste, and readings of the machines."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl.metrics import MetricInfo

_PER_DEVICE = "Tokens per second and device"
_IN_TRAINING, _IN_GENERATION = f"{_PER_DEVICE}, training", f"{_PER_DEVICE}, generation"
_TOKENS = "tokens per second"
_WASTE = "Waste in the step"

RATE_METRICS: Mapping[str, MetricInfo] = {
    "performance/tokens_per_sec_per_gpu": MetricInfo(
        _PER_DEVICE, _TOKENS, "`total_num_tokens` per second of the step and device of the run", smooth=True
    ),
    "performance/policy_training_tokens_per_sec_per_gpu": MetricInfo(
        _IN_TRAINING, _TOKENS, "the same tokens per second of `policy_training` and device that trains"
    ),
    "performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu": MetricInfo(
        _IN_TRAINING, _TOKENS, "per second of `policy_and_reference_logprobs` and device that trains"
    ),
    "performance/training_worker_group_tokens_per_sec_per_gpu": MetricInfo(
        _IN_TRAINING, _TOKENS, "per second of both together and device that trains"
    ),
    "performance/generation_tokens_per_sec_per_gpu": MetricInfo(
        _IN_GENERATION,
        _TOKENS,
        "prompts and responses per second of `generation` and device that generates; with asynchronous rollouts per "
        "second of training, log-probs and the wait for rollouts",
    ),
    "performance/generated_tokens_per_sec_per_gpu": MetricInfo(
        _IN_GENERATION, _TOKENS, "responses alone per the same seconds and device"
    ),
    "performance/training_worker_group_tokens_per_sec": MetricInfo(
        "Tokens per second by group", _TOKENS, "of all devices that train together"
    ),
    "performance/generation_tokens_per_sec": MetricInfo(
        "Tokens per second by group", _TOKENS, "of all devices that generate together"
    ),
    "performance/samples_per_sec_per_gpu": MetricInfo(
        "Samples per second and device", "samples per second", "`samples_per_sec` per device of the run", smooth=True
    ),
    "performance/training_worker_idle_time_ratio": MetricInfo(
        _WASTE,
        "share",
        "share of the step in which the devices that train wait: for rollouts, and for rewards where nothing else runs",
        "above 0.3 with asynchronous rollouts: more devices for generation",
        smooth=True,
    ),
    "performance/average_token_imbalance": MetricInfo(
        _WASTE,
        "share",
        "several generators, one turn: share of their time in which they wait for the one with the most response "
        "tokens, 1 - mean / maximum",
        "above 0.3: more prompts per step",
        smooth=True,
    ),
    "performance/generation_tail_frac": MetricInfo(
        _WASTE,
        "share",
        "long tail of generation: share of places that stay empty if all responses of the step begin together, "
        "1 - mean / maximum of their tokens",
        "above 0.7: a lower `generation.max_new_tokens`, or asynchronous rollouts",
        smooth=True,
    ),
}
SYSTEM_METRICS: Mapping[str, MetricInfo] = {
    "system/node.<n>.cpu_percent": MetricInfo(
        "CPU", "percent of all cores", "use of a node's cores since the reading before, all programs; node 0 is the "
        "driver's", "near 100 while GPUs idle: rewards or tokenization hold the run up"
    ),
    "system/node.<n>.mem_gib": MetricInfo(
        "Memory of a node", "GiB", "memory in use on a node, all programs; the largest reading of the step", "growth"
    ),
    "system/node.<n>.mem_total_gib": MetricInfo("Memory of a node", "GiB", "memory that the node has"),
    "system/node.<n>.process_mem_gib": MetricInfo(
        "Memory of the run", "GiB", "resident memory of the run's own processes on a node", "growth over many steps"
    ),
    "system/node.<n>.gpu.<i>.util": MetricInfo(
        "GPU utilisation", "percent", "share of the time in which a kernel ran on the GPU, as the driver tells it",
        "near 0: the device waits",
    ),
    "system/node.<n>.gpu.<i>.mem_gib": MetricInfo(
        "GPU memory", "GiB", "memory in use on the GPU, all programs; the largest reading of the step",
        "close to what the device has: lower `policy.microbatch_tokens`",
    ),
    "system/run_dir_gib": MetricInfo("Run directory", "GiB", "size of the run's files", "growth: lower `keep_last`"),
    "system/disk_free_gib": MetricInfo("Free disk", "GiB", "free space where the run's files are", "near 0"),
}  # fmt: skip
EFFICIENCY_METRICS = {**RATE_METRICS, **SYSTEM_METRICS}
