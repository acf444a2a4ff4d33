"""The config class of training backends over ``nemorl_tensors.engines.rank_backend``; it imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from nemorl.config import RESUMABLE
from nemorl.config.base import Config
from nemorl.contracts import GenerationCapability, TrainingCapability
from nemorl.contracts.memory import MemoryPart
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import TrainingBackendConfig
from pydantic import Field

from nemorl_rl.models.routers import ROUTER_METRICS, RouterConfig, router_problems
from nemorl_rl.planning.memory.describing import PlansTraining
from nemorl_rl.planning.work_metrics import SHARING_METRICS, WORK_METRICS

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig


class Offload(Config):
    """Parts of a model that lie in the host's memory while the device does not work with them."""

    optimizer: bool = False
    """Masters and moments. They come to the device for each update, in one piece, and go back: forward and backward
    passes have their room, the update has not. Results stay the same, bit for bit."""
    reference: bool = False
    """The frozen initial weights, where a loss compares with them and the model has no adapters. They come to the
    device while they score."""

    @property
    def resting(self) -> tuple[MemoryPart, ...]:
        """Parts that come in when they are needed."""
        parts: tuple[MemoryPart, ...] = ("optimizer", "reference")
        return tuple(part for part in parts if getattr(self, part))


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

    offload: Annotated[Offload, RESUMABLE] = Offload()
    """Parts that lie in the host's memory while the device does other work, where they do not fit together."""

    @property
    def asks_of_sampler(self) -> frozenset[GenerationCapability]:
        return frozenset({"routes"}) if self.router.replay else frozenset()

    def rank_problems(self, policy: PolicyConfig, world_size: int) -> Iterator[ConfigIssue]:
        yield from super().rank_problems(policy, world_size)
        yield from router_problems(policy, self.router)
        if self.router.replay and "routes" not in self.supports:
            message = "this backend lets routers choose by themselves, whatever the sampler chose"
            yield ConfigIssue("backend.router.replay", message, "set it to false, or use backend: dtensor")
