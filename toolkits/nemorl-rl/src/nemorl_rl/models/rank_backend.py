"""The config class of training backends over ``nemorl_tensors.engines.rank_backend``; it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nemorl.contracts import TrainingCapability
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import TrainingBackendConfig

from nemorl_rl.planning.memory.describing import PlansTraining
from nemorl_rl.planning.work_metrics import SHARING_METRICS, WORK_METRICS


class RankBackendConfig(TrainingBackendConfig, PlansTraining):
    """Capabilities of all these backends; a subclass adds its own.

    >>> class MyConfig(RankBackendConfig):
    ...     supports = RankBackendConfig.supports | {"muon"}
    ...     def training_plan(self): return MyPlan(self)
    """

    supports: ClassVar[frozenset[TrainingCapability]] = frozenset(
        {
            *("lora", "adapters", "tensor_parallel_lora", "reference", "activation_checkpointing", "packing"),
            *("shared_prefixes", "value_head", "topk_logprobs", "weights_only_checkpoint", "asynchronous_checkpoint"),
            *("rate_scale", "filtered_logprobs", "offload", "remarks", "activations", "weight_pieces"),
            *("moments", "halved_steps"),
        }
    )
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process", "nccl", "cuda_ipc", "shared_memory", "object_store")
    metrics: ClassVar[Mapping[str, MetricInfo]] = {**WORK_METRICS, **SHARING_METRICS}
