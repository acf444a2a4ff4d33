"""Layouts that could be chosen, all of them judged: the space is small enough for brute force.

A :class:`Choice` is what a plan decides; as a scene it has memory and time, as overrides it is what a config says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

from nemorl_plan.devices import Fleet
from nemorl_plan.efficiencies import Efficiencies
from nemorl_plan.memory import DeviceMemory, device_memory
from nemorl_plan.reading import fed
from nemorl_plan.scene import Scene
from nemorl_plan.seconds import StepTime, step_time

LIKE_LLAMA = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "granite"})
"""Architectures that nemorl-dtensor spreads over tensor-parallel ranks."""
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Of microbatches, in tokens; smaller than a row would change nothing, as rows are never cut."""
UTILIZATIONS = (0.3, 0.4, 0.5, 0.6, 0.8)
"""Of engines that share a device, or take turns on it."""
KV_TOKENS = (16384, 65536, 262144)
"""Of engines that are told how many they may hold."""
SHARES = (0.25, 0.5, 0.75)
"""Of the devices, for engines that are apart."""


@dataclass(frozen=True)
class Choice:
    """One layout."""

    tensor: int
    pipeline: int
    expert: int
    replicas: int
    checkpointing: bool
    budget: int
    """Tokens of a microbatch"""
    colocated: bool
    engines: int
    """0: nothing samples"""
    engine_tensor: int
    utilization: float | None
    kv_tokens: int | None
    is_async: bool


@dataclass(frozen=True)
class Candidate:
    """A choice and what becomes of it."""

    choice: Choice
    memory: DeviceMemory
    time: StepTime
    changes: int
    """How many settings differ from those of the config"""

    @property
    def fits(self) -> bool:
        return self.memory.fits


def present(scene: Scene) -> Choice:
    """What the config says."""
    policy, engines = scene.policy, scene.engines
    return Choice(
        policy.tensor,
        policy.pipeline,
        policy.expert,
        policy.replicas,
        policy.checkpointing,
        policy.budget,
        scene.colocated,
        engines.replicas if engines else 0,
        engines.tensor if engines else 1,
        engines.utilization if engines else None,
        engines.kv_tokens if engines else None,
        scene.is_async,
    )


def judged(scene: Scene, choice: Choice, efficiencies: Efficiencies | None = None) -> Candidate:
    """Memory and time of a choice."""
    chosen = applied(scene, choice)
    differs = sum(getattr(choice, field.name) != getattr(present(scene), field.name) for field in fields(Choice))
    return Candidate(choice, device_memory(chosen), step_time(chosen, efficiencies), differs)


def applied(scene: Scene, choice: Choice) -> Scene:
    """The run under another layout."""
    apart = 0 if choice.colocated else choice.engines * choice.engine_tensor
    ranks = scene.fleet.size - apart
    policy = replace(
        scene.policy,
        ranks=ranks,
        tensor=choice.tensor,
        pipeline=choice.pipeline,
        virtual=scene.policy.virtual if choice.pipeline > 1 else 1,
        expert=choice.expert,
        replicas=choice.replicas,
        checkpointing=choice.checkpointing,
        budget=choice.budget,
    )
    engines = scene.engines and replace(
        scene.engines,
        replicas=choice.engines,
        tensor=choice.engine_tensor,
        utilization=choice.utilization,
        kv_tokens=choice.kv_tokens,
    )
    others = tuple(fed(replace(held, ranks=ranks), scene.work) for held in scene.others)
    return replace(
        scene,
        policy=fed(policy, scene.work),
        others=others,
        engines=engines,
        colocated=choice.colocated,
        takes_turns=scene.takes_turns and choice.colocated,
        is_async=choice.is_async,
    )


def candidates(scene: Scene, efficiencies: Efficiencies | None = None) -> list[Candidate]:
    """All layouts of the run: those that fit, the fastest first; then the others, by what they lack."""
    now = present(scene)
    found = [judged(scene, choice, efficiencies) for choice in {now: None, **dict.fromkeys(choices(scene))}]
    return sorted(
        found, key=lambda one: (not one.fits, one.time.seconds if one.fits else -one.memory.free, one.changes)
    )


def smallest_change(scene: Scene, efficiencies: Efficiencies | None = None) -> Candidate | None:
    """Of what fits, the layout with the fewest changed settings, and of those the fastest."""
    fitting = [one for one in candidates(scene, efficiencies) if one.fits]
    return min(fitting, key=lambda one: (one.changes, one.time.seconds), default=None)


def choices(scene: Scene) -> Iterator[Choice]:
    """Layouts that the backends can be built in on this fleet."""
    policy, now = scene.policy, present(scene)
    row = min(float(policy.width), scene.work.prompt_tokens + scene.work.longest_response)
    budgets = sorted({now.budget, *(size for size in BUDGETS if row <= size < now.budget * 4)})
    for sampling in _samplings(scene):
        apart = 0 if sampling.colocated else sampling.engines * sampling.engine_tensor
        ranks = scene.fleet.size - apart
        spreads = _spreads(scene, ranks)
        for (tensor, pipeline, expert, replicas), again, budget in product(spreads, (False, True), budgets):
            if policy.lora_rank and tensor > 1:
                continue
            yield replace(
                sampling,
                tensor=tensor,
                pipeline=pipeline,
                expert=expert,
                replicas=replicas,
                checkpointing=again,
                budget=budget,
            )


def _samplings(scene: Scene) -> Iterator[Choice]:
    """Where the run's kind of engine can be, and what it may hold."""
    now = present(scene)
    engines, size = scene.engines, scene.fleet.size
    if engines is None:
        yield now
        return
    shares = [engines.utilization] if engines.utilization is None else sorted({engines.utilization, *UTILIZATIONS})
    caches: list[int | None] = [engines.kv_tokens] if engines.kv_tokens is None else [engines.kv_tokens, *KV_TOKENS]
    caches = [
        tokens for tokens in dict.fromkeys(caches) if tokens is None or engines.width <= tokens <= (now.kv_tokens or 0)
    ]
    together = replace(now, colocated=True, engines=size, engine_tensor=1, is_async=False)
    yield from (replace(together, utilization=share, kv_tokens=tokens) for share, tokens in product(shares, caches))
    if engines.is_attached or scene.one_process:
        return
    widths = [1, 2, 4, 8] if engines.backend == "vllm" else [1]
    for width, share, is_async in product(widths, SHARES, (False, True)):
        count = int(size * share) // width
        if width <= scene.fleet.per_node and count and count * width < size and _divides(engines.geometry.heads, width):
            share_of_own = None if engines.utilization is None else 0.9
            yield replace(
                now, colocated=False, engines=count, engine_tensor=width, utilization=share_of_own, is_async=is_async
            )


def _spreads(scene: Scene, ranks: int) -> list[tuple[int, int, int, int]]:
    """(tensor, pipeline, expert, replicas) of the training backend on so many ranks."""
    policy, g = scene.policy, scene.policy.geometry
    tensors = [t for t in (1, 2, 4, 8) if t <= scene.fleet.per_node and ranks % t == 0 and _divides_all(scene, t)]
    if policy.backend == "dtensor":
        copies = sorted({1, policy.replicas, scene.fleet.nodes})
        return [(t, 1, 1, r) for t in tensors for r in copies if ranks % (t * r) == 0]
    pipelines = [p for p in (1, 2, 4, 8, 16) if ranks % p == 0 and g.layers % p == 0]
    experts = [e for e in (1, 2, 4, 8, 16, 32, 64) if e == 1 or (g.experts and g.experts % e == 0)]
    return [
        (t, p, e, 1)
        for t, p, e in product(tensors, pipelines, experts)
        if ranks % (t * p * policy.context) == 0 and ranks % (e * policy.expert_tensor * p) == 0
    ]


def _divides_all(scene: Scene, tensor: int) -> bool:
    policy, g = scene.policy, scene.policy.geometry
    if tensor > 1 and policy.backend == "dtensor" and (g.experts or g.model_type not in LIKE_LLAMA):
        return False
    return all(_divides(size, tensor) for size in (g.heads, g.kv_heads, g.ffn))


def _divides(size: int, ways: int) -> bool:
    return size % ways == 0


def overrides(scene: Scene, choice: Choice) -> dict[str, object]:
    """The keys of a config that make this layout of the present one; only those that differ."""
    now = present(scene)
    policy_keys: dict[str, tuple[str, object]] = {
        "tensor": ("policy.tensor_parallel_size", choice.tensor),
        "pipeline": ("policy.backend.pipeline_parallel_size", choice.pipeline),
        "expert": ("policy.backend.expert_parallel_size", choice.expert),
        "replicas": ("policy.backend.data_parallel_replicas", choice.replicas),
        "checkpointing": ("policy.activation_checkpointing", choice.checkpointing),
        "budget": ("policy.microbatch_tokens", choice.budget),
        "utilization": ("generation.backend.gpu_memory_utilization", choice.utilization),
        "kv_tokens": ("generation.backend.kv_cache_tokens", choice.kv_tokens),
        "engine_tensor": ("generation.backend.tensor_parallel_size", choice.engine_tensor),
        "colocated": ("cluster.colocated", choice.colocated),
        "is_async": ("rollouts.mode", "async" if choice.is_async else "sync"),
    }
    found = {key: value for name, (key, value) in policy_keys.items() if getattr(choice, name) != getattr(now, name)}
    if not choice.colocated and (choice.engines != now.engines or now.colocated):
        found["cluster.generation_workers"] = choice.engines
    elif choice.colocated and not now.colocated:
        found["cluster.generation_workers"] = None
    return found


def fleet_overrides(fleet: Fleet) -> dict[str, object]:
    """The keys of a config for these devices."""
    if fleet.device.is_cpu:
        return {}
    return {"cluster.num_nodes": fleet.nodes, "cluster.gpus_per_node": fleet.per_node}
