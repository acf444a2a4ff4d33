"""Layouts that a run could have: the space is small enough for brute force.

A :class:`Choice` is what a plan changes; applied to a scene it has memory and time, as overrides it is what a config
says. Which settings a backend has is the backend's to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.config.base import Config

from nemorl_rl.planning.devices import Fleet
from nemorl_rl.planning.memory.budgets import Budget, budgets, closest, settled
from nemorl_rl.planning.memory.scene import Scene

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig

    from nemorl_rl.placement.tenants import Phase

Settings = tuple[tuple[str, object], ...]
"""Keys and values, only those that differ from the config's."""
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Of microbatches, in tokens; smaller than a row would change nothing, as rows are never cut."""
SHARES = (0.25, 0.5, 0.75)
"""Of the devices, for engines that are apart."""
MODE = "rollouts.mode"
"""The setting of a layout that changes what a run learns: samples are as old as it says."""
NODE_DEVICES, MOST_DEVICES = 8, 256
"""Of a node, and of all, that a run that does not fit is told it needs."""

AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class Choice:
    """One layout, as it differs from the config's."""

    training: Settings
    """Of ``policy``"""
    sampling: Settings
    """Of ``generation.backend``"""
    colocated: bool
    engines: int
    """0: nothing samples"""
    is_async: bool
    turns: bool | None
    """``cluster.take_turns``"""


def present(scene: Scene) -> Choice:
    """The choice of the config."""
    engines = scene.engines.replicas if scene.engines is not None else 0
    return Choice((), (), scene.colocated, engines, scene.is_async, scene.turns)


def changes(scene: Scene, choice: Choice) -> int:
    """How many settings differ from those of the config."""
    now = present(scene)
    places = (
        choice.colocated != now.colocated,
        choice.engines != now.engines,
        choice.is_async != now.is_async,
        choice.turns != now.turns,
    )
    return len(choice.training) + len(choice.sampling) + sum(places)


def keeps_learning(scene: Scene, choice: Choice) -> bool:
    """The layout changes seconds and memory alone: samples come from weights as old as those of the config."""
    return choice.is_async == scene.is_async


def applied(scene: Scene, choice: Choice) -> Scene:
    """The run under another layout."""
    engines = scene.engines
    if engines is not None:
        backend = updated(engines.backend, choice.sampling)
        engines = replace(engines, backend=backend, replicas=choice.engines)
    ranks = _training_ranks(scene, engines.devices if engines is not None else 0, choice.colocated)
    policy = replace(
        scene.policy, policy=updated(scene.policy.policy, choice.training), ranks=ranks, default_budget=None
    )
    inherited = scene.others_beside(policy.policy)
    others = (
        replace(one, policy=inherited.get(one.role, one.policy), ranks=ranks, default_budget=None)
        for one in scene.others
    )
    return settled(
        replace(
            scene,
            policy=policy.fed(scene.work),
            others=tuple(model.fed(scene.work) for model in others),
            engines=engines,
            colocated=choice.colocated,
            lends=_lends(scene, choice),
            turns=choice.turns,
            is_async=choice.is_async,
        )
    )


def _lends(scene: Scene, choice: Choice) -> bool:
    """Training still has idle devices, if it lent them before."""
    return scene.lends and not (choice.colocated or choice.is_async)


def updated(config: AnyConfig, settings: Settings) -> AnyConfig:
    """A config with other values; keys may lead into a section, as in ``backend.pipeline_parallel_size``."""
    own: dict[str, Any] = {key: value for key, value in settings if "." not in key}
    inner: dict[str, list[tuple[str, object]]] = {}
    for key, value in settings:
        section, _, rest = key.partition(".")
        if rest:
            inner.setdefault(section, []).append((rest, value))
    own |= {section: updated(getattr(config, section), tuple(values)) for section, values in inner.items()}
    return config.model_copy(update=own) if own else config


def differing(config: Config, settings: Mapping[str, object]) -> Settings:
    """Those that the config does not have already."""
    return tuple((key, value) for key, value in settings.items() if _value(config, key) != value)


def _value(config: Any, key: str) -> object:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def choices(scene: Scene) -> Iterator[Choice]:
    """Layouts that the backends can be built in on this fleet."""
    policy = scene.policy
    row = min(float(policy.width), scene.work.prompt_tokens + scene.work.longest_response)
    sizes = sorted({policy.budget, *(size for size in BUDGETS if row <= size < policy.budget * 4)}, reverse=True)
    for sampling in _samplings(scene):
        devices = sampling.engines * _devices_per_engine(scene, sampling)
        model = replace(policy, ranks=_training_ranks(scene, devices, sampling.colocated))
        spreads = [differing(policy.policy, spread) for spread in model.plan.layouts(model, scene.fleet.per_node)]
        for spread, again, size in product(spreads, (False, True), sizes):
            asked: dict[str, object] = {"activation_checkpointing": again}
            if size != policy.budget:
                asked |= {"microbatch_tokens": size}
            settings = (*spread, *differing(policy.policy, asked))
            if _can_be(scene, settings, model.ranks):
                yield replace(sampling, training=settings)


def _can_be(scene: Scene, settings: Settings, ranks: int) -> bool:
    """The backends have no objection."""
    policy = updated(scene.policy.policy, settings)
    return all(_can_spread(model, ranks) for model in (policy, *scene.others_beside(policy).values()))


def _can_spread(policy: PolicyConfig, ranks: int) -> bool:
    if policy.lora is not None and policy.tensor_parallel_size > 1:
        return "tensor_parallel_lora" in policy.backend.supports
    return ranks % policy.backend.ranks_per_copy(policy) == 0


def _samplings(scene: Scene) -> Iterator[Choice]:
    """Where the run's kind of engine can be, and what it may hold."""
    now, engines, size = present(scene), scene.engines, scene.fleet.size
    if engines is None:
        yield now
        return
    turns = dict.fromkeys([scene.turns, None])
    for options, turn in product(engines.plan.options(engines, apart=False, per_node=scene.fleet.per_node), turns):
        settings = differing(engines.backend, options)
        width = updated(engines.backend, settings).devices_per_replica
        count = engines.replicas if scene.colocated and width == engines.tensor else size // width
        yield replace(now, sampling=settings, colocated=True, engines=count, is_async=False, turns=turn)
    if engines.is_attached or scene.one_process:
        return
    apart = engines.plan.options(engines, apart=True, per_node=scene.fleet.per_node)
    for options, share, is_async in product(apart, SHARES, (False, True)):
        settings = differing(engines.backend, options)
        width = updated(engines.backend, settings).devices_per_replica
        count = int(size * share) // width
        if count and count * width < size:
            yield replace(now, sampling=settings, colocated=False, engines=count, is_async=is_async, turns=None)


def _devices_per_engine(scene: Scene, choice: Choice) -> int:
    engines = scene.engines
    return updated(engines.backend, choice.sampling).devices_per_replica if engines is not None else 0


def _training_ranks(scene: Scene, devices: int, colocated: bool) -> int:
    return scene.fleet.size - (0 if colocated else devices)


def smallest_change(scene: Scene, *, at_most: Mapping[Phase, float] | None = None) -> Choice | None:
    """The least change of the config that fits; ``None``: nothing fits.

    Args:
        scene: The run.
        at_most: Phase -> bytes that it may be planned to need, where that is less than the device has.
    """

    def judged() -> Iterator[tuple[Choice, Budget]]:
        for choice in dict.fromkeys((present(scene), *choices(scene))):
            if not keeps_learning(scene, choice):
                continue
            found = budgets(applied(scene, choice))
            if all(found[phase].needed <= size for phase, size in (at_most or {}).items() if phase in found):
                yield choice, closest(found)

    return least(scene, judged())


def least(scene: Scene, judged: Iterable[tuple[Choice, Budget]]) -> Choice | None:
    """Of the layouts that fit, the one with the fewest changed settings, and of those the one that leaves least unused:
    it gives up least."""
    fitting = ((changes(scene, choice), budget.free, choice) for choice, budget in judged if budget.fits)
    found = min(fitting, key=lambda one: one[:2], default=None)
    return found[2] if found is not None else None


def overrides(scene: Scene, choice: Choice) -> dict[str, object]:
    """The keys of a config that make this layout of the present one; only those that differ."""
    now = present(scene)
    found: dict[str, object] = {f"policy.{key}": value for key, value in choice.training}
    found |= {f"generation.backend.{key}": value for key, value in choice.sampling}
    if choice.colocated != now.colocated:
        found["cluster.colocated"] = choice.colocated
    if scene.lends and not _lends(scene, choice):
        found["cluster.lend_training_devices"] = False
    if choice.is_async != now.is_async:
        found[MODE] = "async" if choice.is_async else "sync"
    if choice.turns != now.turns:
        found["cluster.take_turns"] = choice.turns
    if not choice.colocated and (choice.engines != now.engines or now.colocated):
        found["cluster.generation_workers"] = choice.engines
    elif choice.colocated and not now.colocated:
        found["cluster.generation_workers"] = None
    return found


def as_overrides(keys: Mapping[str, object]) -> list[str]:
    """``path=value`` of each."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]


def enough_devices(scene: Scene) -> Fleet | None:
    """The fewest devices of the same kind on which some layout fits, by doubling: within a node first; ``None``: none
    that is tried, or processors, which share one memory."""
    fleet = scene.fleet
    if fleet.device.is_cpu:
        return None
    while fleet.size < MOST_DEVICES:
        in_node = 2 * fleet.per_node <= NODE_DEVICES and fleet.nodes == 1
        fleet = replace(fleet, per_node=2 * fleet.per_node) if in_node else replace(fleet, nodes=2 * fleet.nodes)
        if smallest_change(replace(scene, fleet=fleet, one_process=False)) is not None:
            return fleet
    return None


def as_fix(scene: Scene, change: Choice | None) -> str:
    """The change in the words of an error's ``fix``; ``None``: no layout fits."""
    if change is None:
        enough = enough_devices(scene)
        more = "more devices" if enough is None else f"{enough.nodes} x {enough.per_node} {enough.device.name}"
        return f"use a smaller model, LoRA, or {more} (`nemorl plan` shows what fits where)"
    words = " ".join(as_overrides(overrides(scene, change)))
    return f"the smallest change that fits: {words} (`nemorl plan` shows what else does)"


def fleet_overrides(fleet: Fleet) -> dict[str, object]:
    """The keys of a config for these devices."""
    if fleet.device.is_cpu:
        return {}
    return {"cluster.num_nodes": fleet.nodes, "cluster.gpus_per_node": fleet.per_node}
