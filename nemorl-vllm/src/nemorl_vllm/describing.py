"""How vLLM's engines describe themselves to planners: a share of the device that they take for themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemorl_rl.memory_plan.describing import EngineMemory
from nemorl_rl.memory_plan.engines import Engines
from nemorl_rl.memory_plan.parts import GIB, Part, count

from nemorl_vllm.config import CPU_KV_CACHE_GIB

if TYPE_CHECKING:
    from nemorl_vllm.config import VLLMConfig

UTILIZATIONS = (0.3, 0.4, 0.5, 0.6, 0.8)
"""Of engines that share a device, or take turns on it."""
OWN_DEVICE = 0.9
WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class VLLMPlan:
    """Of engines under these options. On GPUs vLLM replays graphs of whole decoding steps."""

    config: VLLMConfig
    layer_start_s: float = 0.0
    step_start_s: float = 3e-3

    @property
    def max_rows(self) -> int:
        return self.config.max_num_seqs

    def memory(self, engines: Engines, capacity: float, sequences: int) -> EngineMemory:
        """Weights and cache, always; beyond ``kv_cache_gib`` the share counts what vLLM's process takes."""
        weights, fixed = engines.weights, self._cache_gib(engines)
        if fixed is not None:
            return EngineMemory((weights, Part("KV cache", fixed * GIB, f"kv_cache_gib = {fixed:g}", "cache")), ())
        share = self.config.gpu_memory_utilization
        room = self._room(engines, capacity)
        text = f"{share:g} x {capacity / GIB:.1f} GiB - weights: {count(room / engines.token_bytes)} tokens"
        lacks = weights.size + engines.width * engines.token_bytes - share * capacity
        cache = Part("KV cache", room, text, "cache")
        return EngineMemory((weights, cache), (), lacks=max(0.0, lacks), counts_overhead=True)

    def cached_tokens(self, engines: Engines, capacity: float) -> float:
        fixed = self._cache_gib(engines)
        return (fixed * GIB if fixed is not None else self._room(engines, capacity)) / engines.token_bytes

    def options(self, engines: Engines, *, apart: bool, per_node: int) -> Iterator[Mapping[str, object]]:
        if apart:
            for width in WIDTHS:
                if width <= per_node and engines.geometry.heads % width == 0:
                    yield {"tensor_parallel_size": width, "gpu_memory_utilization": OWN_DEVICE}
            return
        for share in sorted({self.config.gpu_memory_utilization, *UTILIZATIONS}):
            yield {"tensor_parallel_size": 1, "gpu_memory_utilization": share}

    def _cache_gib(self, engines: Engines) -> float | None:
        """What is set, or the default of a CPU; ``None``: a share of the device."""
        return self.config.kv_cache_gib or (CPU_KV_CACHE_GIB if engines.on_cpu else None)

    def _room(self, engines: Engines, capacity: float) -> float:
        return max(0.0, self.config.gpu_memory_utilization * capacity - engines.weights.size)
