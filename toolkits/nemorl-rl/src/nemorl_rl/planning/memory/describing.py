"""How a backend describes itself to whoever plans: protocols that its config class implements, and what they speak of.

A training backend's config class inherits :class:`PlansTraining`, a generation backend's :class:`PlansEngine`; both
return an object that knows the backend's formulas. Nothing else knows them, and nobody asks for a backend's name.
``docs/planning.md`` describes a backend from scratch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nemorl.errors import UsageError

from nemorl_rl.planning.memory.parts import Moments, Parts
from nemorl_rl.planning.memory.work import RowLayout

if TYPE_CHECKING:
    from nemorl.plugins.kinds import GenerationBackendConfig, PluginConfig, TrainingBackendConfig

    from nemorl_rl.planning.memory.engines import Engines
    from nemorl_rl.planning.memory.models import HeldModel


@dataclass(frozen=True)
class Spread:
    """How a training backend divides a model and its data over ranks.

    >>> Spread(data=4, tensor=2).shards
    1
    """

    data: int
    """Groups of ranks that compute different data"""
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Parts of each pipeline stage"""
    context: int = 1
    expert: int = 1
    shards: int = 1
    """Ranks that divide parameters or optimizer state, of the same part of the model"""
    mtp_passes: int = 0
    """Forward passes of one depth of MTP, by layers besides the model's own, that training makes of each sequence; a
    backward pass counts as two"""
    gathers_layers: bool = False
    """Each microbatch gathers every layer and reduces its gradients (FSDP); else once per update"""
    mixture_start_s: float = 0.0
    """Seconds that the host takes for a mixture layer's forward and backward pass, whatever the GPU's speed: it reads
    how many tokens each expert gets, and starts the experts one by one"""


class TrainingPlan(Protocol):
    """A training backend's account of the models that it trains.

    >>> PolicyConfig().backend.training_plan().gpu_frac
    0.4
    """

    @property
    def gpu_frac(self) -> float:
        """Share of a GPU's peak that forward and backward passes reach."""
        ...

    @property
    def layer_start_s(self) -> float:
        """Seconds of starting one layer's forward and backward pass on a GPU."""
        ...

    def spread(self, model: HeldModel) -> Spread:
        """How the model lies on ``model.ranks`` ranks."""
        ...

    def memory(self, model: HeldModel) -> Moments:
        """Of the fullest rank, with microbatches of ``model.microbatch_tokens``."""
        ...

    def row_layout(self, model: HeldModel, sharing: float) -> RowLayout:
        """How sequences become rows that have ``sharing`` times the tokens of a tree of them."""
        ...

    def layouts(self, model: HeldModel, per_node: int) -> Iterator[Mapping[str, object]]:
        """Ways to spread the model over ``model.ranks`` ranks, ``per_node`` on a node, as keys of ``PolicyConfig``:
        ``{"tensor_parallel_size": 2, "backend.pipeline_parallel_size": 4}``. All name the same keys."""
        ...


class PlansTraining(ABC):
    """A training backend's config class that describes itself.

    >>> class MyConfig(TrainingBackendConfig, PlansTraining):
    ...     def training_plan(self): return MyPlan(self)
    """

    @abstractmethod
    def training_plan(self) -> TrainingPlan:
        """The plan of a model under these options."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one of an engine's devices.

    >>> EngineMemory(lasting=(), passing=()).lacks
    0.0
    """

    lasting: Parts
    """Also while models train, unless it sleeps"""
    passing: Parts
    """Besides, while it samples"""
    lacks: float = 0.0
    """Bytes by which what it was given is too small for its weights and one sequence"""
    counts_overhead: bool = False
    """True: these parts include the memory of its process and allocator"""


class EnginePlan(Protocol):
    """A generation backend's account of its engines.

    >>> GenerationConfig().backend.engine_plan().max_rows
    256
    """

    @property
    def layer_start_s(self) -> float:
        """Seconds of starting one layer's kernels on a GPU, per decoding step; 0 where graphs are replayed."""
        ...

    @property
    def step_start_s(self) -> float:
        """Seconds of a decoding step besides: sampling, scheduling."""
        ...

    @property
    def max_rows(self) -> int:
        """Most samples decoded at once."""
        ...

    @property
    def layer_element(self) -> float | None:
        """Bytes of a weight in the layers; ``None``: as many as the policy's."""
        ...

    def memory(self, engines: Engines, capacity: float, sequences: int) -> EngineMemory:
        """Of a device of ``capacity`` bytes, for so many sequences over all engines."""
        ...

    def cached_tokens(self, engines: Engines, capacity: float) -> float:
        """Tokens whose keys and values an engine holds at once."""
        ...

    def options(self, engines: Engines, *, apart: bool, per_node: int) -> Iterator[Mapping[str, object]]:
        """Settings of the backend's config that a plan may choose, beside a trainer or on devices of its own. All name
        the same keys."""
        ...


class PlansEngine(ABC):
    """A generation backend's config class that describes itself.

    >>> class MyConfig(GenerationBackendConfig, PlansEngine):
    ...     def engine_plan(self): return MyPlan(self)
    """

    @abstractmethod
    def engine_plan(self) -> EnginePlan:
        """The plan of an engine under these options."""


def training_plan(backend: TrainingBackendConfig) -> TrainingPlan:
    """A backend's account of itself.

    Raises:
        UsageError: It says nothing.
    """
    if not isinstance(backend, PlansTraining):
        raise _silent(backend, PlansTraining)
    return backend.training_plan()


def engine_plan(backend: GenerationBackendConfig) -> EnginePlan:
    """A backend's account of itself.

    Raises:
        UsageError: It says nothing.
    """
    if not isinstance(backend, PlansEngine):
        raise _silent(backend, PlansEngine)
    return backend.engine_plan()


def _silent(backend: PluginConfig, asked: type) -> UsageError:
    name = type(backend).__name__
    return UsageError(
        f"the backend of {name} does not say what it takes of a device: the class is no {asked.__name__}",
        fix=f"plan with another backend, or let the class inherit {asked.__module__}.{asked.__name__}",
    )


@dataclass(frozen=True)
class PerToken:
    """Bytes per token of one rank's part of a row."""

    layer: float
    """Of one layer, all kept"""
    entry: float
    """Of one layer whose activations are computed again: its input"""
    outside: float
    """After the last layer: its norm, and the states that predict scored tokens"""
    passing: float
    """Gradients within a layer, at the fullest moment of its backward pass"""
    ending: float
    """The same at its end, in the first norm"""
