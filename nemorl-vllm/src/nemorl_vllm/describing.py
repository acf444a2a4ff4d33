"""How vLLM's engines describe themselves to planners: a share of the device that they take for themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from nemorl_rl.models.divisions import LayerSizes
from nemorl_rl.planning.memory.describing import EngineMemory
from nemorl_rl.planning.memory.engines import Engines
from nemorl_rl.planning.memory.parts import GIB, Part, Parts, count, total

from nemorl_vllm.config import CPU_KV_CACHE_GIB, adapter_room

if TYPE_CHECKING:
    from nemorl_vllm.config import VLLMConfig

UTILIZATIONS = (0.3, 0.4, 0.5, 0.6, 0.8)
"""Of engines that share a device, or take turns on it."""
OWN_DEVICE = 0.9
CACHES_GIB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Sizes of a cache that is given in GiB."""
FP8_BLOCK = 128
"""Side of the blocks of a weight that share a scale."""
MXFP8_GROUP = 32
"""Features that share a scale."""
WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class VLLMPlan:
    """Of engines under these options. On GPUs vLLM replays graphs of whole decoding steps."""

    config: VLLMConfig
    layer_start_s: float = 0.0
    step_start_s: float = 5e-3
    """Scheduling, sampling with log-probs and reading them, none of it beside the GPU's work (asynchronous scheduling
    is off). Not measured on GPUs by us."""

    @property
    def layer_element(self) -> float | None:
        """One byte and its share of a scale: a float32 for each block, or a byte for 32 features."""
        return {"fp8": 1 + 4 / FP8_BLOCK**2, "mxfp8": 1 + 1 / MXFP8_GROUP}.get(self.config.precision or "")

    @property
    def max_rows(self) -> int:
        return self.config.max_num_seqs

    def memory(self, engines: Engines, capacity: float, sequences: int) -> EngineMemory:
        """Weights and cache, always; beyond ``kv_cache_gib`` the share counts what vLLM's process takes."""
        weights, fixed = self._weights(engines), self._cache_gib(engines)
        if fixed is not None:
            return EngineMemory((*weights, Part("KV cache", fixed * GIB, f"kv_cache_gib = {fixed:g}", "cache")), ())
        share = self.config.gpu_memory_utilization
        room = self._room(engines, capacity)
        text = f"{share:g} x {capacity / GIB:.1f} GiB - weights: {count(room / self._token_bytes(engines))} tokens"
        longest = engines.width * self._token_bytes(engines) * self.config.data_parallel_size  # it is on one rank
        lacks = total(weights) + longest - share * capacity
        cache = Part("KV cache", room, text, "cache")
        return EngineMemory((*weights, cache), (), lacks=max(0.0, lacks), counts_overhead=True)

    def cached_tokens(self, engines: Engines, capacity: float) -> float:
        fixed = self._cache_gib(engines)
        return (fixed * GIB if fixed is not None else self._room(engines, capacity)) / self._token_bytes(engines)

    def options(self, engines: Engines, *, apart: bool, per_node: int) -> Iterator[Mapping[str, object]]:
        shares = [OWN_DEVICE] if apart else sorted({self.config.gpu_memory_utilization, *UTILIZATIONS})
        beside = self.config.pipeline_parallel_size * self.config.data_parallel_size
        layer = LayerSizes.of(engines.geometry, copies_key_values=True)
        # A part of a node, or whole nodes with each layer on one of them.
        fitting = [
            width
            for width in (WIDTHS if self.config.data_parallel_size == 1 else (1,))
            if width <= per_node and 0 in (per_node % (width * beside), width * beside % per_node)
        ]
        widths = [width for width in fitting if layer.divide(width)]
        fixed = self._cache_gib(engines)
        caches = [self.config.kv_cache_gib, *(size for size in CACHES_GIB if fixed is not None and size < fixed)]
        for width, share, cache in product(widths, shares, caches):
            yield {"tensor_parallel_size": width, "gpu_memory_utilization": share, "kv_cache_gib": cache}

    def _cache_gib(self, engines: Engines) -> float | None:
        """The size that is set, or the default of a CPU; ``None``: a share of the device."""
        return self.config.kv_cache_gib or (CPU_KV_CACHE_GIB if engines.on_cpu else None)

    def _token_bytes(self, engines: Engines) -> float:
        """Of one token, on one device, divided over all of the engine: tensor-parallel ranks beyond the number of
        key-value heads hold copies of these. Data-parallel ranks hold tokens of their own."""
        copies = max(1.0, self.config.tensor_parallel_size / engines.geometry.cache_parts)
        shrunk = 1 if self.config.cache_precision is None else engines.element
        return engines.token_bytes * copies / shrunk

    def _room(self, engines: Engines, capacity: float) -> float:
        return max(0.0, self.config.gpu_memory_utilization * capacity - total(self._weights(engines)))

    def _weights(self, engines: Engines) -> Parts:
        """The model's, and places for adapters of the next rank that vLLM knows. A CPU also has embedding and head in
        the order of its kernels (``packed``), and what is in that order stays where it is."""
        held: Parts = (replace(engines.weights, stays=engines.on_cpu), *self._rank_copies(engines))
        if engines.on_cpu:
            elements = 2 * engines.geometry.embedding_parameters
            ways = engines.tensor // self.config.data_parallel_size
            text = f"{engines.element} B x {count(elements)} / {ways}"
            size = engines.element * elements / ways
            held += (Part("packed embeddings", size, text, "weights", stays=True),)
        if not engines.adapter_rank:
            return held
        rank, slots = adapter_room(engines.adapter_rank) or engines.adapter_rank, self.config.adapter_slots
        text = f"{slots} x rank {rank} x {count(engines.rank_bytes)}B / {engines.tensor}"
        adapters = Part("engine adapters", slots * rank * engines.rank_bytes / engines.tensor, text, "weights")
        return (*held, adapters)

    def _rank_copies(self, engines: Engines) -> Parts:
        """Data-parallel ranks each hold all but the experts, which they share."""
        copies = self.config.data_parallel_size - 1
        if not copies:
            return ()
        elements = engines.geometry.parameters() - engines.geometry.expert_parameters
        text = f"{copies} x {engines.element} B x {count(elements)} / {engines.tensor}"
        size = copies * engines.element * elements / engines.tensor
        return (Part("copies of attention", size, text, "weights", stays=engines.on_cpu),)
