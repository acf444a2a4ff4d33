"""The scene of a plan: the models of a run, its engines, its devices, and the work of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemorl.config.models import Placement

from nemorl_rl.planning.devices import Fleet
from nemorl_rl.planning.memory.engines import Engines
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.work import Work

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig

OthersBeside = Callable[["PolicyConfig"], Mapping[str, "PolicyConfig"]]
"""A policy -> the other models of its run, by role"""


@dataclass(frozen=True)
class Scene:
    """A run as it is planned."""

    fleet: Fleet
    policy: HeldModel
    others: tuple[HeldModel, ...]
    """Critics and teachers, on the policy's devices"""
    engines: Engines | None
    work: Work
    colocated: bool = True
    lends: bool = False
    """Engines apart have company on the devices of training, while these are idle"""
    is_async: bool = False
    staleness: int = 1
    """Steps over which a batch may be sampled, where that is done beside training"""
    turns: bool | None = None
    """``cluster.take_turns``; unset: where they can and not all fit awake"""
    takes_turns: bool = False
    """Whoever is not at work leaves the device's memory: what became of ``turns``"""
    one_process: bool = False
    """Everything shares one process and its allocator"""
    placement: Placement = field(default_factory=Placement)
    """On these devices"""
    others_beside: OthersBeside = field(default=lambda _: {}, compare=False)
    """Configs that other models inherit from a policy that is changed"""

    @property
    def models(self) -> tuple[HeldModel, ...]:
        """On training backends, the policy first."""
        return (self.policy, *self.others)

    @property
    def sync_bytes(self) -> float:
        """Of the weights that travel to an engine."""
        travels = self.policy.adapter_parameters if self.placement.form == "adapters" else self.policy.parameters
        return self.policy.element * travels

    @property
    def capacity(self) -> float:
        """Bytes of a device."""
        return self.fleet.device.memory_gib * 2**30

    @property
    def neighbours(self) -> Engines | None:
        """Engines on the devices of training."""
        return self.engines if self.shares_devices else None

    @property
    def shares_devices(self) -> bool:
        """Some engines are on the devices of training."""
        return self.colocated or self.lends

    @property
    def sampling_engines(self) -> int:
        """Those that share the prompts of a step."""
        assert self.engines is not None, "the run samples"
        return self.engines.replicas + (self.policy.ranks // self.engines.tensor if self.lends else 0)

    @property
    def can_take_turns(self) -> bool:
        """Engine and policy can leave a device that they share, and gain by it."""
        engines = self.neighbours
        if engines is None or not engines.has_own_weights or self.fleet.device.is_cpu:
            return False
        return engines.can_sleep and self.policy.can_leave
