"""The config classes that plugins subclass: one per kind. A plugin *is* its config class.

A plugin's ``config.py`` imports pydantic and nemorl only; ``build()`` is the one line that reaches torch, vLLM or
Megatron. So listing, validation, schema export and dry runs work where those are absent, and every worker process
rebuilds its part from the pickled config.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nemorl.config.base import Config
from nemorl.errors import ConfigIssue, PluginError
from nemorl.metrics import MetricInfo

if TYPE_CHECKING:
    from nemorl.config.models import GenerationConfig, PolicyConfig, TrainingOptions
    from nemorl.contracts import (
        Environment,
        GenerationBackend,
        GenerationCapability,
        Head,
        Logger,
        TrainingBackend,
        TrainingCapability,
        WeightTransport,
    )
    from nemorl.resources.worker import WorkerContext
    from nemorl.types import Row
    from nemorl.weights import Distance, WeightHandle


def _checked_build(build: Callable[..., Any], *, may_be_none: bool) -> Callable[..., Any]:
    """A method ``build`` that refuses to return nothing, or a class where an object belongs.

    Args:
        build: As the plugin's config class defines it.
        may_be_none: ``None`` is an answer, as for a split that a dataset does not have.
    """

    @wraps(build)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        part = build(self, *arguments, **options)
        if isinstance(part, type) or (part is None and not may_be_none):
            what = "nothing" if part is None else f"the class {part.__name__}, not an object of it"
            owner = f"{type(self).__module__}:{type(self).__qualname__}"
            raise PluginError(f"build() of {owner} returned {what}", fix="end it with `return`, and the part itself")
        return part

    return checked


class PluginConfig(Config):
    """Base of all plugin configs: class data about the plugin, readable without torch.

    >>> PluginConfig.missing_modules()
    []
    """

    summary: ClassVar[str] = ""
    """One line for ``plugins list``."""
    requires_modules: ClassVar[tuple[str, ...]] = ()
    """Import names that ``build()`` needs."""
    install_hint: ClassVar[str] = ""
    """The command that installs them, e.g. ``pip install "nemorl-vllm[cuda]"``."""
    supports: ClassVar[frozenset[Any]] = frozenset()
    """Capabilities by name, of backends: :mod:`nemorl.contracts`."""
    metrics: ClassVar[Mapping[str, MetricInfo]] = {}
    """What it logs, by full name, e.g. ``train/environment/moves``; shown in the report and the documentation."""

    builds_nothing: ClassVar[bool] = False
    """``build`` may return ``None``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (build := cls.__dict__.get("build")) is not None:
            cls.build = _checked_build(build, may_be_none=cls.builds_nothing)  # type: ignore[attr-defined]

    @classmethod
    def missing_modules(cls) -> list[str]:
        """Modules of ``requires_modules`` that cannot be found. Looks for them, imports none."""
        return [name for name in cls.requires_modules if not _can_be_found(name)]


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a.b where a is absent; a module that was made by hand has no spec
        return module in sys.modules


class TrainingBackendConfig(PluginConfig):
    """Base of training backends (entry-point group ``nemorl.training_backends``).

    >>> TrainingBackendConfig().data_shards(PolicyConfig(tensor_parallel_size=2), world_size=4)
    (0, 0, 1, 1)
    """

    supports: ClassVar[frozenset[TrainingCapability]] = frozenset()
    """Its capabilities, compared with the run's needs when the config loads."""
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process",)
    """Ways it can hand weights to a generator, best first."""

    @property
    def interpreter(self) -> Path | None:
        """The Python that its workers need; ``None``: one like this process's."""
        return None

    @property
    def asks_of_sampler(self) -> frozenset[GenerationCapability]:
        """Capabilities that its options need the policy's sampler to have."""
        return frozenset()

    def ranks_per_copy(self, policy: PolicyConfig) -> int:
        """Ranks that hold one copy of the model together: they get the same data and answer as one."""
        return policy.tensor_parallel_size

    def data_shards(self, policy: PolicyConfig, world_size: int) -> tuple[int, ...]:
        """Which shard of the data each rank works on, by rank. The first rank of a shard answers for it.

        By default the ranks of one copy are neighbours. ``world_size`` is a multiple of ``ranks_per_copy``.
        """
        width = self.ranks_per_copy(policy)
        return tuple(rank // width for rank in range(world_size))

    def rank_problems(self, policy: PolicyConfig, world_size: int) -> Iterator[ConfigIssue]:
        """Problems of a run on this many ranks, a multiple of ``ranks_per_copy``. Paths begin at the policy."""
        yield from ()

    def build(
        self, policy: TrainingOptions, worker: WorkerContext, *, reference: bool, head: Head = "language_model"
    ) -> TrainingBackend:
        """This rank's part of the policy, ready to train.

        Args:
            policy: Model, precision, optimizer and batching, the same for all backends, as the run resolved them:
                ``schedule.decay_steps`` is always set.
            worker: Rank, device and seed of this process.
            reference: Keep the initial weights for ``get_logprobs(weights="reference")``.
            head: What stands on top of the model's decoder. ``value`` is asked only of backends that support
                ``value_head``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build()")


class GenerationBackendConfig(PluginConfig):
    """Base of generation backends (entry-point group ``nemorl.generation_backends``).

    >>> GenerationBackendConfig().devices_per_replica
    1
    """

    supports: ClassVar[frozenset[GenerationCapability]] = frozenset()
    """Its capabilities, compared with the run's needs when the config loads."""
    weight_transports: ClassVar[tuple[str, ...]] = ("in_process",)
    """Ways it can receive weights, best first. One that supports ``any_transport`` also takes another that a run asks
    for by name (``cluster.weight_transport``), if its class data fit."""

    @property
    def interpreter(self) -> Path | None:
        """The Python that its workers need; ``None``: one like this process's."""
        return None

    colocates_with: ClassVar[str | None] = None
    """Name of the training backend in whose processes it can live, over the trainer's own weights: colocated runs with
    that backend then build it by ``build_in``. ``None``: it always has a model of its own."""

    @property
    def devices_per_replica(self) -> int:
        """Devices that one engine spreads over (its own tensor parallelism). The kernel reserves them."""
        return 1

    def policy_problems(self, policy: PolicyConfig, *, device: str, is_attached: bool) -> Iterator[ConfigIssue]:
        """Problems with this policy. Paths begin at the run's config.

        Args:
            policy: The model to generate with, and its training backend.
            device: torch device of a worker, ``cpu`` or ``cuda:0``.
            is_attached: It is built in the trainer's processes (``colocates_with``).
        """
        yield from ()

    def build(
        self, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None
    ) -> GenerationBackend:
        """An engine that is ready to generate.

        Args:
            generation: Sampling defaults and limits.
            policy: The model it serves.
            worker: Rank, device and seed of this process.
            weights: Start from these; ``None`` loads ``policy.model_name`` from disk.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build()")

    def build_in(
        self, trainer: TrainingBackend, generation: GenerationConfig, policy: PolicyConfig, worker: WorkerContext
    ) -> GenerationBackend:
        """An engine in a trainer's process, over its live weights: ``update_weights`` is then given a handle without
        payload, after each update. All ranks of the trainer run the same calls; the first of a data shard answers."""
        raise NotImplementedError(f"{type(self).__name__} names a backend to live with and must define build_in()")


class EnvironmentConfig(PluginConfig):
    """Base of environments (entry-point group ``nemorl.environments``).

    >>> class BrevityConfig(EnvironmentConfig):
    ...     def build(self): return nemorl.RewardFunction(lambda prompt, response: -len(response))
    """

    drives_policy: ClassVar[bool] = False
    """That of what it builds."""

    def build(self) -> Environment:
        """An environment, ready to score."""
        raise NotImplementedError(f"{type(self).__name__} must define build()")


class DatasetConfig(PluginConfig):
    """Base of datasets (entry-point group ``nemorl.datasets``).

    >>> class SumsConfig(DatasetConfig):
    ...     def build(self, split): return [{"prompt": "1+1=", "answer": "2"}] if split == "train" else None
    >>> SumsConfig().first_row()["answer"]
    '2'
    """

    builds_nothing: ClassVar[bool] = True

    def build(self, split: str) -> Sequence[Row] | None:
        """The rows of ``train`` or ``validation``; ``None`` where there is no such split.

        Rows carry ``prompt`` (text or messages) and, for graders, ``answer``; or ``messages`` for chat training;
        or ``prompt``, ``chosen`` and ``rejected`` for preferences. Other columns are kept.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build()")

    def first_row(self) -> Row | None:
        """One train row, to check its columns when the config loads. Override it where ``build`` is slow or downloads;
        ``None`` leaves the check to the run."""
        rows = self.build("train")
        return rows[0] if rows is not None and len(rows) else None


class LoggerConfig(PluginConfig):
    """Base of loggers (entry-point group ``nemorl.loggers``).

    >>> class PrintedConfig(LoggerConfig):
    ...     def build(self, run_dir): return Printed()
    """

    def build(self, run_dir: Path) -> Logger:
        """A logger that writes under or about ``run_dir``."""
        raise NotImplementedError(f"{type(self).__name__} must define build()")


class WeightTransportConfig(PluginConfig):
    """Base of weight transports (entry-point group ``nemorl.weight_transports``).

    >>> WeightTransportConfig.reach, WeightTransportConfig.works_colocated
    ('node', True)
    """

    reach: ClassVar[Distance] = "node"
    """How far apart trainer and generator may be."""
    devices: ClassVar[frozenset[str] | None] = None
    """Types of device that both sides may be on; ``None``: any."""
    works_colocated: ClassVar[bool] = True
    """Whether both sides may be on the same device."""
    reaches_subprocesses: ClassVar[bool] = False
    """Whether a payload can be fetched in any process within reach, such as those that an engine starts."""
    takes_device_memory: ClassVar[bool] = False
    """Whether it lies on the trainer's device: engines copy it, and where they share devices it is then released."""
    is_mapped: ClassVar[bool] = False
    """Whether receivers map what was published, and read of it what they need."""

    def build(self) -> WeightTransport:
        """One end of the transport; a run builds one on each side."""
        raise NotImplementedError(f"{type(self).__name__} must define build()")


class HookConfig(PluginConfig):
    """Base of hooks (entry-point group ``nemorl.hooks``).

    >>> class GuardConfig(HookConfig):
    ...     limit: float = 0.3
    ...     def build(self): return KLGuard(self.limit)
    """

    def build(self) -> object:
        """The object whose ``on_*`` methods are called at the events of a run; every run builds one."""
        raise NotImplementedError(f"{type(self).__name__} must define build()")


class ReportSectionConfig(PluginConfig):
    """Base of report sections (entry-point group ``nemorl.report_sections``).

    >>> class NoteConfig(ReportSectionConfig):
    ...     def build(self): return lambda run: Section("Note", [Text(f"{run.last_step} steps")])
    """

    unasked: ClassVar[bool] = False
    """Stands, with its defaults, also in reports of runs that do not list it."""

    def build(self) -> Callable[[Any], Any]:
        """The function that makes a ``Section`` of a run's records (``RunData``), or ``None`` where it has nothing to
        show. Both types are in ``nemorl_cli.report``."""
        raise NotImplementedError(f"{type(self).__name__} must define build()")
