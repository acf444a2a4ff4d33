"""How the training backend describes itself to planners: layouts, rows, efficiency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from nemorl_rl.planning.memory.describing import Spread
from nemorl_rl.planning.memory.models import HeldModel, tensor_sizes
from nemorl_rl.planning.memory.parts import Moments
from nemorl_rl.planning.memory.work import MIN_SHARING, RowLayout

from nemorl_dtensor.activations import EAGER
from nemorl_dtensor.mixtures import SPLIT_AROUND_EXPERTS
from nemorl_dtensor.training_memory import Memory

if TYPE_CHECKING:
    from nemorl_dtensor.config import DTensorConfig

LIKE_LLAMA = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "granite"})
"""Architectures that ``sharding`` spreads over tensor-parallel ranks."""


@dataclass(frozen=True)
class DTensorPlan:
    """Of models that ``dtensor`` trains."""

    config: DTensorConfig
    cpu_kernels: bool = True
    """On the CPU, in one process: norms are one function, the head's gradient is added to the sums as it comes"""
    gpu_frac: float = 0.40
    """Llama 3 (arXiv:2407.21783, table 4) reaches 0.38 to 0.43 with all overlaps. Not measured on GPUs by us."""
    layer_start_s: float = 1.5e-3

    def spread(self, model: HeldModel) -> Spread:
        context, groups = self.config.context_parallel_size, max(1, model.ranks // model.tensor)
        shards = max(1, groups // self.config.data_parallel_replicas)
        return Spread(
            max(1, groups // context),
            model.tensor,
            context=context,
            expert=self.config.expert_parallel_size,
            shards=shards,
            gathers_layers=True,
        )

    def row_layout(self, model: HeldModel, sharing: float) -> RowLayout:
        """Packed rows take flash attention, and a plan does not know whether that is there."""
        if self.config.layout != "auto":
            return self.config.layout
        attends_to_all = model.geometry.window is None and model.geometry.model_type not in EAGER
        return "shared" if attends_to_all and sharing > MIN_SHARING else "padded"

    def layouts(self, model: HeldModel, per_node: int) -> Iterator[Mapping[str, object]]:
        g = model.geometry
        is_spread = g.model_type in (SPLIT_AROUND_EXPERTS if g.experts else LIKE_LLAMA)
        tensors = tensor_sizes(model, per_node) if is_spread else [1]
        copies = sorted({1, self.config.data_parallel_replicas, max(1, model.ranks // per_node)})
        context = self.config.context_parallel_size
        experts = [e for e in (1, 2, 4, 8, 16, 32, 64) if e == 1 or (g.experts and g.experts % e == 0)]
        for tensor, replicas, expert in product(tensors, copies, experts):
            if model.ranks % (replicas * expert) or model.ranks % (tensor * context * replicas):
                continue
            if g.experts and tensor > 1 and (expert == 1 or context > 1 or not self.config.sequence_parallel):
                continue
            divided = tensor * context if self.config.context_parallel_method == "ulysses" else tensor
            if g.heads % divided == 0:
                yield {
                    "tensor_parallel_size": tensor,
                    "backend.data_parallel_replicas": replicas,
                    "backend.expert_parallel_size": expert,
                }

    def memory(self, model: HeldModel) -> Moments:
        # Ranks that share sequences have equal parts of a microbatch's tokens.
        model = replace(model, microbatch_tokens=-(-model.microbatch_tokens // self.config.context_parallel_size))
        fused = self.cpu_kernels and model.on_cpu and model.ranks == 1
        return Memory(model, self.config, fused=fused).moments()
