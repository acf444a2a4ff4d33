"""The metrics that training backends log of their own work (``work.WorkMeter``). Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from nemorl.metrics import MetricInfo

WORK_METRICS: Mapping[str, MetricInfo] = {
    "performance/train_flops_per_gpu": MetricInfo(
        "Training speed of a device",
        "TFLOP/s",
        "what the sequences need by NeMo RL's formulas (every token, three times the forward pass), per second of the "
        "backend's steps and device, a CPU process counting as one",
        smooth=True,
    ),
    "performance/computed_flops_per_gpu": MetricInfo(
        "Training speed of a device",
        "TFLOP/s",
        "matrix products really made, padding and recomputation included, tokens that are left out or shared not",
        smooth=True,
    ),
    "performance/train_fp_utilization": MetricInfo(
        "Utilisation in training",
        "share",
        "`train_flops_per_gpu` over the peak of the device (model FLOPs utilisation, MFU); above 1 where sharing saves "
        "more than the device lacks. A CPU's peak is measured when the model is built",
        "a fall: other jobs on the device, or smaller microbatches",
        smooth=True,
    ),
    "performance/computed_fp_utilization": MetricInfo(
        "Utilisation in training",
        "share",
        "`computed_flops_per_gpu` over the peak of the device (hardware FLOPs utilisation)",
        "below 0.2 on a GPU: raise `policy.microbatch_tokens`",
        smooth=True,
    ),
    "performance/computed_tokens": MetricInfo(
        "Computed tokens", "tokens", "positions that went through the model, padding included, per optimizer step"
    ),
    "performance/padding_frac": MetricInfo(
        "Waste in training",
        "share",
        "share of the computed tokens that are padding",
        "above 0.3: raise `policy.microbatch_tokens`, or use a packed layout",
        smooth=True,
    ),
    "performance/rank_wait_frac": MetricInfo(
        "Waste in training",
        "share",
        "share of the training time in which ranks wait for the one with the most tokens: 1 - mean / maximum",
        "above 0.2: more sequences per step, or shorter ones at most",
        smooth=True,
    ),
}
"""Of every training backend."""

SHARING_METRICS: Mapping[str, MetricInfo] = dict.fromkeys(
    ("train/tree_ratio", "train/<model>/tree_ratio"),
    MetricInfo(
        "Tokens per computed token",
        meaning="tokens of the sequences per token that is computed, for the policy and other models that learn: "
        "above 1 where those that sequences have in common are computed once",
        watch_for="1 with several responses per prompt: a remark in `events.jsonl` says what is in the way",
    ),
)
"""Of backends that compute tokens that sequences have in common once (``nemorl_tensors.engines.layouts``)."""
