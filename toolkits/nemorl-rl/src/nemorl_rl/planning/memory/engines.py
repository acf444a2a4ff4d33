"""Engines that sample, and the memory of those that decode rows over a cache that grows with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.memory.describing import EngineMemory, EnginePlan, engine_plan
from nemorl_rl.planning.memory.parts import Part, count
from nemorl_rl.serving.snapshots import held_versions

if TYPE_CHECKING:
    from nemorl.plugins.kinds import GenerationBackendConfig

KV_TOKENS = (16384, 65536, 262144)
"""Limits of a cache that plans try."""


@dataclass(frozen=True)
class Engines:
    """All engines of a run: they are alike.

    >>> Engines(GenerationConfig().backend, geometry, 2, replicas=8, width=4096).devices  # doctest: +SKIP
    8
    """

    backend: GenerationBackendConfig
    geometry: Geometry
    element: int
    """Bytes of a weight, and of keys and values"""
    replicas: int
    width: int
    """Tokens of the longest prompt and response"""
    on_cpu: bool = False
    shares_weights: bool = False
    """They read the trainer's tensors"""
    merges: bool = False
    """They read them with adapters merged, which are copies"""
    is_attached: bool = False
    """They live in the trainer's processes"""
    adapter_rank: int = 0
    """Of the adapters that they apply beside the model; 0: what comes to them is the model"""
    rank_bytes: float = 0.0
    """Of these adapters, all layers, for each rank"""
    row: int | None = None
    """Tokens of the longest row that a step is expected to have; unset: as long as may be"""

    @cached_property
    def plan(self) -> EnginePlan:
        """Their backend's account of itself.

        Raises:
            UsageError: It says nothing.
        """
        return engine_plan(self.backend)

    @property
    def tensor(self) -> int:
        """Devices of one engine."""
        return self.backend.devices_per_replica

    @property
    def devices(self) -> int:
        return self.replicas * self.tensor

    @property
    def versions(self) -> int:
        """Of the weights, that one engine holds at most."""
        return held_versions(self.backend)

    @property
    def has_own_weights(self) -> bool:
        return self.merges or not self.lives_on_trainer

    @property
    def lives_on_trainer(self) -> bool:
        """They run on the trainer's tensors, which so stay in memory while they sample."""
        return self.shares_weights or self.is_attached

    @property
    def can_sleep(self) -> bool:
        """They can leave the devices' memory while others work."""
        return "sleep" in self.backend.supports

    @property
    def token_bytes(self) -> float:
        """Keys and values of one token, on one device, divided over all of the engine."""
        return self.element * self.geometry.cache_elements / self.tensor

    @property
    def layer_element(self) -> float:
        """Bytes of a weight in the layers."""
        return self.plan.layer_element or self.element

    @property
    def weights(self) -> Part:
        """On one device, all versions that are held."""
        if not self.has_own_weights:
            return Part("engine weights", 0.0, "the trainer's own", "weights")
        outside = self.geometry.embedding_parameters * (1 if self.geometry.tied else 2)
        layers = self.geometry.parameters() - outside
        size = self.versions * (self.layer_element * layers + self.element * outside) / self.tensor
        text = f"({self.layer_element:.3g} B x {count(layers)} + {self.element} B x {count(outside)}) / {self.tensor}"
        if self.versions > 1:
            text += f" x {self.versions} versions"
        return Part("engine weights", size, text, "weights")


def rows_memory(engines: Engines, sequences: int, max_rows: int, kv_tokens: int) -> EngineMemory:
    """Of an engine whose cache grows with the rows that it decodes, and goes with them.

    Args:
        engines: Its own sizes.
        sequences: Of all engines.
        max_rows: Decoded at once, of each version of the weights.
        kv_tokens: Held at once, of each version of the weights.

    >>> rows_memory(engines, sequences=64, max_rows=256, kv_tokens=65536).passing[0].name  # doctest: +SKIP
    'KV cache'
    """
    rows = min(engines.versions * max_rows, -(-sequences // engines.replicas))
    row, vocabulary = engines.row or engines.width, engines.geometry.vocabulary
    tokens = min(engines.versions * kv_tokens, rows * row)
    each = engines.token_bytes
    cache = Part("KV cache", tokens * each, f"{count(tokens)} tokens x {count(each)}B", "cache")
    logits = Part("sampling", 12.0 * rows * vocabulary / engines.tensor, f"12 B x {rows} rows x {count(vocabulary)}")
    return EngineMemory((engines.weights,), (cache, logits))


def cache_sizes(present: int, width: int) -> list[int]:
    """Tokens that such a cache may be limited to: those of the config, and less, but a longest sequence at least.

    >>> cache_sizes(present=65536, width=4096)
    [65536, 16384]
    """
    return [present, *(size for size in KV_TOKENS if width <= size < present)]


@dataclass(frozen=True)
class RowsPlan:
    """The ``EnginePlan`` of engines that decode rows in this process and start each kernel from Python.

    Their config has ``kv_cache_tokens``.

    >>> RowsPlan(8, 4096, layer_start_s=3e-4, step_start_s=2e-3).max_rows
    8
    """

    max_rows: int
    kv_cache_tokens: int
    layer_start_s: float
    step_start_s: float
    layer_element: float | None = None

    def memory(self, engines: Engines, capacity: float, sequences: int) -> EngineMemory:
        return rows_memory(engines, sequences, self.max_rows, self.kv_cache_tokens)

    def cached_tokens(self, engines: Engines, capacity: float) -> float:
        return float(self.kv_cache_tokens)

    def options(self, engines: Engines, *, apart: bool, per_node: int) -> Iterator[Mapping[str, object]]:
        for tokens in cache_sizes(self.kv_cache_tokens, engines.width):
            yield {"kv_cache_tokens": tokens}
