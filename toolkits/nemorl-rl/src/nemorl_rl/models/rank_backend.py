"""The config class of training backends over ``nemorl_tensors.engines.rank_backend``; it imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from nemorl.contracts import GenerationCapability, TrainingCapability
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import TrainingBackendConfig
from pydantic import Field

from nemorl_rl.models.routers import ROUTER_METRICS, RouterConfig, router_problems
from nemorl_rl.planning.memory.describing import PlansTraining
from nemorl_rl.planning.work_metrics import SHARING_METRICS, WORK_METRICS

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig


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
    metrics: ClassVar[Mapping[str, MetricInfo]] = {**WORK_METRICS, **SHARING_METRICS, **ROUTER_METRICS}

    router: RouterConfig = Field(default_factory=RouterConfig)
    """Of mixtures of experts: how routers are kept even, in which precision they score, and whose choice counts."""

    @property
    def asks_of_sampler(self) -> frozenset[GenerationCapability]:
        return frozenset({"routes"}) if self.router.replay else frozenset()

    def rank_problems(self, policy: PolicyConfig, world_size: int) -> Iterator[ConfigIssue]:
        yield from super().rank_problems(policy, world_size)
        yield from router_problems(policy, self.router)
        if self.router.replay and "routes" not in self.supports:
            message = "this backend lets routers choose by themselves, whatever the sampler chose"
            yield ConfigIssue("backend.router.replay", message, "set it to false, or use backend: dtensor")
