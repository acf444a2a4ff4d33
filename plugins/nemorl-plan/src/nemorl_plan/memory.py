"""Memory of the fullest device, over all that shares it: models that learn, engines, processes; and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemorl_plan.dtensor_memory import dtensor_memory
from nemorl_plan.megatron_memory import megatron_memory
from nemorl_plan.models import HeldModel
from nemorl_plan.parts import GIB, Moments, Part, count, total
from nemorl_plan.scene import Engines, Scene

MEMORY_OF: Mapping[str, Callable[[HeldModel], Moments]] = {"dtensor": dtensor_memory, "megatron": megatron_memory}
"""Training backend -> memory of a model on it."""
BUCKET_BYTES = 256 * 2**20
"""Of ``nemorl_tensors.engines.buckets``: weights on their way to engines."""
PROCESS_GIB = {True: 0.4, False: 0.7}
"""(on the CPU?) -> what a process takes before it has a model: libraries, CUDA context, communicators."""
SLACK_FRAC = {True: 0.2, False: 0.08}
"""(on the CPU?) -> what allocators take beyond the tensors: fragmentation, scratch of matrix libraries."""
REFUSAL_MARGIN_FRAC = 0.15
"""A run is refused only when the tensors alone, less this share, exceed the device."""


@dataclass(frozen=True)
class DeviceMemory:
    """The fullest device of the run."""

    where: str
    """``training`` or ``generation``"""
    parts: tuple[Part, ...]
    """At its fullest moment"""
    moment: str
    capacity: float
    """Bytes"""
    asleep: float
    """Bytes that engines hold while models train"""
    awake: float
    """Bytes that engines hold while they sample"""
    engine_lacks: float = 0.0
    """Bytes that an engine's share of the device is too small for its weights and one sequence"""

    @property
    def needed(self) -> float:
        return total(self.parts)

    @property
    def free(self) -> float:
        """Bytes; negative where it does not fit."""
        return min(self.capacity - self.needed, -self.engine_lacks if self.engine_lacks > 0 else self.capacity)

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def cannot_fit(self) -> bool:
        """Not even with the declared margin."""
        tensors = total(part for part in self.parts if part.name not in ("processes", "allocator"))
        return max(tensors, self.capacity + self.engine_lacks) * (1 - REFUSAL_MARGIN_FRAC) > self.capacity

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.size)


def device_memory(scene: Scene) -> DeviceMemory:
    """Of the device that is closest to its limit."""
    found = [_training(scene)]
    if scene.engines is not None and not scene.colocated:
        found.append(_generation(scene, scene.engines))
    return min(found, key=lambda memory: memory.free)


def _training(scene: Scene) -> DeviceMemory:
    models = [(held, MEMORY_OF[held.backend](held)) for held in (scene.policy, *scene.others)]
    on_cpu, engines = scene.fleet.device.is_cpu, scene.engines if scene.colocated else None
    capacity = scene.fleet.device.memory_gib * GIB
    asleep, extra = engine_parts(engines, capacity, scene.work.sequences) if engines is not None else ((), ())
    if scene.takes_turns and engines is not None:
        return _turns(scene, engines, models, capacity)
    moments = {f"{held.role}: {name}": parts for held, found in models for name, parts in found.passing.items()}
    moments |= {"generation": extra} if engines is not None else {}
    if engines is not None and not (engines.shares_weights or engines.is_attached):
        moments["weight sync"] = (sync_buffers(scene.policy, ends=2),)
    lasting = [_named(part, held.role) for held, found in models for part in found.lasting]
    worst = max(moments, key=lambda name: total(moments[name]))
    if scene.one_process:
        passing = list(moments[worst])
    else:  # each process keeps what its fullest moment took
        passing = [_named(part, held.role) for held, found in models for part in found.passing.get(found.worst, ())]
        passing += extra
    ranks_per_device = _processes(scene)
    parts = _finished([*lasting, *passing, *asleep], on_cpu=on_cpu, processes=ranks_per_device, reserved=engines)
    return DeviceMemory(
        "training", parts, worst, capacity, total(asleep), total(asleep) + total(extra), lacks(engines, capacity)
    )


def _turns(scene: Scene, engines: Engines, models: list[tuple[HeldModel, Moments]], capacity: float) -> DeviceMemory:
    """The fullest turn, where only those at work are in the device's memory."""
    asleep, extra = engine_parts(engines, capacity, scene.work.sequences)
    weights = [part for part in models[0][1].lasting if part.name == "weights"]
    turns = {f"{held.role}: {found.worst}": [_named(part, held.role) for part in found.peak] for held, found in models}
    turns["generation"] = [*asleep, *extra]
    engine_weights = [part for part in asleep if part.name == "engine weights"]
    turns["weight sync"] = [*weights, *engine_weights, sync_buffers(scene.policy, ends=2)]
    on_cpu, processes = scene.fleet.device.is_cpu, _processes(scene)
    finished = {
        name: _finished(parts, on_cpu=on_cpu, processes=processes, reserved=engines if name == "generation" else None)
        for name, parts in turns.items()
    }
    worst = max(finished, key=lambda name: total(finished[name]))
    awake = total(asleep) + total(extra)
    return DeviceMemory("training", finished[worst], worst, capacity, 0.0, awake, lacks(engines, capacity))


def _generation(scene: Scene, engines: Engines) -> DeviceMemory:
    capacity = scene.fleet.device.memory_gib * GIB
    asleep, extra = engine_parts(engines, capacity, scene.work.sequences)
    parts = [*asleep, *extra, sync_buffers(scene.policy, ends=1)]
    finished = _finished(parts, on_cpu=scene.fleet.device.is_cpu, processes=1, reserved=engines)
    return DeviceMemory(
        "generation",
        finished,
        "generation",
        capacity,
        total(asleep),
        total(asleep) + total(extra),
        lacks(engines, capacity),
    )


def lacks(engines: Engines | None, capacity: float) -> float:
    """Bytes by which an engine's own share of the device is too small; 0 where it has none, or enough."""
    if engines is None or engines.utilization is None or engines.kv_gib is not None:
        return 0.0
    g, t = engines.geometry, engines.tensor
    needed = engines.element * (g.parameters() + engines.width * g.cache_elements) / t
    return max(0.0, needed - engines.utilization * capacity)


def engine_parts(engines: Engines, capacity: float, sequences: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """(what an engine always holds, what it holds besides while it samples) of one of its devices."""
    g, b, t = engines.geometry, engines.element, engines.tensor
    size = 0.0 if engines.shares_weights or engines.is_attached else b * g.parameters() / t
    weights = Part("engine weights", size, f"{b} B x {count(g.parameters())} / {t}" if size else "the trainer's own")
    each = b * g.cache_elements / t
    if engines.kv_gib is not None:
        cache = Part("KV cache", engines.kv_gib * GIB, f"kv_cache_gib = {engines.kv_gib:g}")
        return (weights, cache), ()
    if engines.utilization is not None:
        room = max(0.0, engines.utilization * capacity - size)
        text = f"{engines.utilization:g} x {capacity / GIB:.1f} GiB - weights: {count(room / each)} x {count(each)}B"
        return (weights, Part("KV cache", room, text)), ()
    rows = min(engines.max_rows, -(-sequences // engines.replicas))
    tokens = min(engines.kv_tokens or 10**12, rows * engines.width)
    cache = Part("KV cache", tokens * each, f"{count(tokens)} tokens x {count(each)}B")
    logits = Part(
        "sampling",
        12.0 * rows * g.vocabulary / t,
        f"12 B x {rows} rows x {count(g.vocabulary)}",
    )
    return (weights,), (cache, logits)


def cached_tokens(engines: Engines, capacity: float) -> float:
    """Tokens whose keys and values an engine holds at once."""
    each = engines.element * engines.geometry.cache_elements / engines.tensor
    if engines.kv_gib is not None:
        return engines.kv_gib * GIB / each
    if engines.utilization is not None:
        room = engines.utilization * capacity - engines.element * engines.geometry.parameters() / engines.tensor
        return max(0.0, room / each)
    return float(engines.kv_tokens or engines.max_rows * engines.width)


def sync_buffers(policy: HeldModel, *, ends: int) -> Part:
    """A bucket of weights on its way, and the largest tensor, which is never cut."""
    largest = policy.element * policy.geometry.embedding_parameters
    size = ends * max(BUCKET_BYTES, largest)
    return Part("sync buffers", size, f"{ends} x max(256 MiB, {count(largest)}B)")


def _processes(scene: Scene) -> int:
    if scene.one_process:
        return 1
    engines = scene.colocated and scene.engines is not None and not scene.engines.is_attached
    return 1 + len(scene.others) + engines


def _finished(parts: list[Part], *, on_cpu: bool, processes: int, reserved: Engines | None) -> tuple[Part, ...]:
    """With what processes and allocators take. vLLM counts its own within its share."""
    own = total(parts)
    if reserved is not None and reserved.utilization is not None and reserved.kv_gib is None:
        own -= total(part for part in parts if part.name in ("engine weights", "KV cache"))
    slack = SLACK_FRAC[on_cpu]
    return (
        *(part for part in parts if part.size > 0),
        Part("allocator", slack * own, f"{slack:.0%} of {own / GIB:.2f} GiB"),
        Part("processes", processes * PROCESS_GIB[on_cpu] * GIB, f"{processes} x {PROCESS_GIB[on_cpu]} GiB"),
    )


def _named(part: Part, role: str) -> Part:
    return part if role == "policy" else Part(f"{role} {part.name}", part.size, part.formula)
