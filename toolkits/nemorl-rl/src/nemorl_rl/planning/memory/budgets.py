"""Memory of the fullest device in each phase of a step: who is there, what the work takes besides, and whether it fits.

The phases are those of ``nemorl_rl.placement.tenants``. Where models take turns, only the tenants that its table names
are in memory; elsewhere all are, in every phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nemorl.contracts.memory import MemoryPart

from nemorl_rl.placement.tenants import ENGINE, POLICY, ROLLOUT, SYNC, OnDevice, Phase, phases
from nemorl_rl.planning.memory.describing import EngineMemory
from nemorl_rl.planning.memory.models import MICROBATCH_TOKENS, SMALLER_BUDGETS, HeldModel
from nemorl_rl.planning.memory.parts import GIB, Part, Parts, count, total
from nemorl_rl.planning.memory.scene import Scene

BUCKET_BYTES = 256 * 2**20
"""Of ``nemorl_tensors.engines.buckets``: weights on their way to engines."""
PROCESS_GIB = {True: 0.4, False: 0.7}
"""(on the CPU?) -> what a process takes before it has a model: libraries, CUDA context, communicators."""
SLACK_FRAC = {True: 0.2, False: 0.08}
"""(on the CPU?) -> what allocators take beyond the tensors: fragmentation, scratch of matrix libraries."""
REFUSAL_MARGIN_FRAC = 0.15
"""A run is refused only when the tensors alone, less this share, exceed the device."""
ALLOCATOR, PROCESSES = "allocator", "processes"


@dataclass(frozen=True)
class Budget:
    """Memory of one device in one phase."""

    phase: Phase
    where: str
    """``training`` or ``generation``"""
    held: Mapping[str, Parts]
    """Tenant -> its parts that are there"""
    work: Parts
    """Memory of the phase's work besides, and what other processes keep of theirs"""
    moment: str
    """Of the work, the fullest"""
    overhead: Parts
    """Of processes and allocators"""
    capacity: float
    """Bytes"""
    lacks: float = 0.0
    """Bytes by which an engine's share of the device is too small for its weights and one sequence"""

    @property
    def parts(self) -> Parts:
        """All of them, those of others than the policy by its name."""
        held = (_named(part, tenant) for tenant, parts in self.held.items() for part in parts)
        return tuple(part for part in (*held, *self.work, *self.overhead) if part.size > 0)

    @property
    def needed(self) -> float:
        """Bytes."""
        return total(self.parts)

    @property
    def free(self) -> float:
        """Bytes; negative where it does not fit."""
        return min(self.capacity - self.needed, -self.lacks if self.lacks > 0 else self.capacity)

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def cannot_fit(self) -> bool:
        """Not even with the declared margin."""
        tensors = self.needed - total(self.overhead)
        return max(tensors, self.capacity + self.lacks) * (1 - REFUSAL_MARGIN_FRAC) > self.capacity

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.size)

    def held_bytes(self, tenant: str) -> dict[MemoryPart, float]:
        """Planned bytes of a tenant's parts, as its ``held_bytes`` counts them."""
        found: dict[MemoryPart, float] = {}
        for part in self.held.get(tenant, ()):
            if part.held is not None:
                found[part.held] = found.get(part.held, 0.0) + part.size
        return found


def settled(scene: Scene) -> Scene:
    """With turns taken as asked for; unasked, where models can and do not all fit awake. Microbatches whose size the
    config leaves open are then as large as fits, up to what backends take by themselves."""
    if scene.turns is not None or not scene.can_take_turns:
        has_others = scene.engines is not None or scene.policy.has_reference or bool(scene.others)
        found = replace(scene, takes_turns=bool(scene.turns) and scene.shares_devices and has_others)
    else:
        found = replace(scene, takes_turns=not fullest(replace(scene, takes_turns=False)).fits)
    is_open = any(model.policy.microbatch_tokens is None for model in scene.models)
    if not is_open or fullest(found).fits:
        return found
    most = MICROBATCH_TOKENS[scene.fleet.device.is_cpu]
    sizes = (most, *(size for size in SMALLER_BUDGETS if size < most))
    tried = [found, *(_with_budget(found, size) for size in sizes[1:])]
    # Where nothing fits, none is smaller than helps: it may be another phase's memory that lacks.
    enough = min(0.0, fullest(tried[-1]).free)
    return next(one for one in tried if fullest(one).free >= enough)


def _with_budget(scene: Scene, tokens: int) -> Scene:
    policy, *others = (replace(model, default_budget=tokens).fed(scene.work) for model in scene.models)
    return replace(scene, policy=policy, others=tuple(others))


def fullest(scene: Scene) -> Budget:
    """Of the phase and the device that is closest to its limit."""
    return closest(budgets(scene))


def closest(found: Mapping[Phase, Budget]) -> Budget:
    """To its device's limit."""
    return min(found.values(), key=lambda budget: budget.free)


def budgets(scene: Scene) -> dict[Phase, Budget]:
    """Phase -> memory of the fullest device of it, in the order of a step."""
    engines = scene.neighbours
    engine = engines.plan.memory(engines, scene.capacity, scene.work.sequences) if engines is not None else None
    present = _present(scene, engine)
    on_device = _on_device(scene, present, engine)
    found = {}
    for phase, tenant, moment, work in _works(scene, engine):
        held = {
            name: tuple(part for part in parts if part.stays or part.held in on_device[phase].get(name, ()))
            for name, parts in present.items()
        }
        kept = _kept_by_others(scene, engine, tenant)
        overhead = _overhead(scene, held, (*work, *kept), engine)
        lacks = engine.lacks if engine is not None and phase == ROLLOUT else 0.0
        found[phase] = Budget(phase, "training", held, (*work, *kept), moment, overhead, scene.capacity, lacks)
    if scene.engines is not None and not scene.colocated:
        apart = _generation(scene)
        found = {ROLLOUT: min(apart, found.pop(ROLLOUT, apart), key=lambda budget: budget.free), **found}
    return found


def _present(scene: Scene, engine: EngineMemory | None) -> dict[str, Parts]:
    """Tenant -> all that it ever keeps between its moments of work, or for the whole of its phase."""
    found = {model.role: model.moments.lasting for model in scene.models}
    if engine is not None:
        found[ENGINE] = (*engine.lasting, *(part for part in engine.passing if part.held is not None))
    return found


def _on_device(scene: Scene, present: Mapping[str, Parts], engine: EngineMemory | None) -> Mapping[Phase, OnDevice]:
    """Phase -> who is in memory with which parts."""
    roles = [model.role for model in scene.models]
    adapted = [model.role for model in scene.models if model.lora_rank]
    shares = scene.engines is not None and scene.engines.lives_on_trainer
    table = phases(roles, shares_weights=shares, adapted=adapted)
    everything: OnDevice = {
        name: tuple(dict.fromkeys(part.held for part in parts if part.held is not None))
        for name, parts in present.items()
    }
    if scene.takes_turns:
        staying = {model.role: everything[model.role] for model in scene.models if not model.can_leave}
        return {phase: {**needed, **staying} for phase, needed in table.items()}
    # An engine whose cache goes with its rows has it only while it samples.
    asleep = everything
    if engine is not None:
        asleep = {**everything, ENGINE: tuple(part.held for part in engine.lasting if part.held is not None)}
    return {phase: everything if phase == ROLLOUT else asleep for phase in table}


def _works(scene: Scene, engine: EngineMemory | None) -> Iterator[tuple[Phase, str, str, Parts]]:
    """(phase, tenant at work, its fullest moment, what that takes) of the devices of training."""
    if engine is not None:
        yield ROLLOUT, ENGINE, "generation", tuple(part for part in engine.passing if part.held is None)
    for model in scene.models:
        yield from _works_of(model, scores=scene.work.old_frac > 0 or model is not scene.policy)
    engines = scene.engines
    if engines is not None and engines.has_own_weights:
        yield SYNC, POLICY, "weight sync", (sync_buffers(scene, sends=True, receives=scene.shares_devices),)


def _works_of(model: HeldModel, *, scores: bool) -> Iterator[tuple[Phase, str, str, Parts]]:
    training = model.moments.training
    if model.has_reference:
        yield Phase(model.role, "reference"), model.role, "scoring", model.moments.scoring
    if scores:
        yield Phase(model.role, "measure"), model.role, "scoring", model.moments.scoring
    if training:
        moment = max(training, key=lambda name: total(training[name]))
        yield Phase(model.role, "train"), model.role, moment, training[moment]


def _kept_by_others(scene: Scene, engine: EngineMemory | None, at_work: str) -> Parts:
    """Processes that do not leave the device keep what their fullest moment took."""
    if scene.one_process:
        return ()
    found = []
    for model in scene.models:
        if model.role != at_work and not (scene.takes_turns and model.can_leave):
            peak = model.moments.passing[model.moments.worst]
            found.append(Part(f"kept by {model.role}", total(peak), f"of its {model.moments.worst}"))
    if engine is not None and at_work != ENGINE and not scene.takes_turns:
        found.append(Part("kept by engine", total(engine.passing), "of its generation"))
    return tuple(part for part in found if part.size)


def _generation(scene: Scene) -> Budget:
    """Of engines on devices of their own."""
    engines = scene.engines
    assert engines is not None, "the caller checks"
    engine = engines.plan.memory(engines, scene.capacity, scene.work.sequences)
    work = (*engine.passing, sync_buffers(scene, sends=False, receives=True))
    held = {ENGINE: engine.lasting}
    overhead = _overhead(scene, held, work, engine, processes=1)
    return Budget(ROLLOUT, "generation", held, work, "generation", overhead, scene.capacity, engine.lacks)


def sync_buffers(scene: Scene, *, sends: bool, receives: bool) -> Part:
    """Weights on their way, on a device that sends or receives them: buckets, of which none is smaller than the largest
    tensor, or a copy of all."""
    policy, whole = scene.policy, scene.sync_bytes
    largest = whole if scene.placement.form == "adapters" else policy.element * policy.geometry.embedding_parameters
    bucket = min(whole, max(BUCKET_BYTES, largest))
    if sends and scene.placement.copies_on_device:
        held = sum(part.size for part in policy.moments.lasting if part.held == "weights")
        own = held if scene.placement.spreads_weights else whole
        text = f"a copy of {count(own)}B" + f" + {count(bucket)}B" * receives
        return Part("sync buffers", own + bucket * receives, text)
    ends = sends + receives
    return Part("sync buffers", ends * bucket, f"{ends} x max(256 MiB, {count(largest)}B)")


def _overhead(
    scene: Scene, held: Mapping[str, Parts], work: Parts, engine: EngineMemory | None, processes: int | None = None
) -> Parts:
    on_cpu = scene.fleet.device.is_cpu
    own = total(work) + sum(total(parts) for parts in held.values())
    if engine is not None and engine.counts_overhead:
        own -= total(held.get(ENGINE, ()))
    slack, number = SLACK_FRAC[on_cpu], _processes(scene) if processes is None else processes
    return (
        Part(ALLOCATOR, slack * own, f"{slack:.0%} of {own / GIB:.2f} GiB"),
        Part(PROCESSES, number * PROCESS_GIB[on_cpu] * GIB, f"{number} x {PROCESS_GIB[on_cpu]} GiB"),
    )


def _processes(scene: Scene) -> int:
    if scene.one_process:
        return 1
    engines = scene.neighbours
    return 1 + len(scene.others) + (engines is not None and not engines.is_attached)


def _named(part: Part, tenant: str) -> Part:
    return part if tenant in (POLICY, ENGINE) else replace(part, name=f"{tenant} {part.name}")
