"""ResourceManager: the one place that decides where worker groups run and how weights travel between them.

Algorithms ask it for policies and for a weight sync; they never learn whether training and generation share a
process, a node or nothing at all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nemorl.config.cluster import ClusterConfig
from nemorl.config.models import AuxiliaryModel, GenerationConfig, PolicyConfig
from nemorl.config.run import RunConfig
from nemorl.contracts import WorkerGroup
from nemorl.errors import WorkerLostError
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl.resources.factories import AttachedEngineFactory, GenerationFactory, TrainingFactory
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.policies import GenerationPolicy, TrainingPolicy
from nemorl.resources.worker import AttachedFactory, AttachedGroup, WorkerContext, WorkerFactory
from nemorl.weights import WeightHandle, in_process_handle


class Launcher(Protocol):
    """Puts worker groups somewhere."""

    def training_group(self, factory: TrainingFactory, name: str) -> WorkerGroup: ...

    def generation_group(self, factory: GenerationFactory, name: str) -> WorkerGroup: ...

    def attached_group(self, hosts: WorkerGroup, factory: AttachedFactory) -> WorkerGroup:
        """Engines in the processes of a group that this launcher made."""
        ...

    def restart(self, group: WorkerGroup, factory: WorkerFactory | None = None) -> None:
        """Replace the lost workers of a group that this launcher made."""
        ...

    def close(self) -> None: ...


class LocalLauncher:
    """Everything in this process."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def training_group(self, factory: TrainingFactory, name: str) -> WorkerGroup:
        return LocalWorkerGroup(factory, self._context, name)

    def generation_group(self, factory: GenerationFactory, name: str) -> WorkerGroup:
        return LocalWorkerGroup(factory, self._context, name)

    def attached_group(self, hosts: WorkerGroup, factory: AttachedFactory) -> WorkerGroup:
        assert isinstance(hosts, LocalWorkerGroup), "the group was made by another launcher"
        hosts.attach_engine(factory)
        return AttachedGroup(hosts)

    def restart(self, group: WorkerGroup, factory: WorkerFactory | None = None) -> None:
        raise AssertionError("a worker in this process cannot be lost without it")

    def close(self) -> None:
        pass


class ResourceManager:
    """Builds and owns the worker groups of one run, on the launcher that ``cluster`` asks for."""

    def __init__(self, config: RunConfig, run_dir: Path, *, on_restart: Callable[[str], None] = lambda _: None) -> None:
        """
        Args:
            config: The run.
            run_dir: Its directory: worker logs go to ``logs/``.
            on_restart: Told, in one line, whenever workers were lost and are being replaced.
        """
        self.config = config
        self._on_restart = on_restart
        self._restarts: deque[float] = deque()
        """Moments of ``time.monotonic()`` at which workers were replaced, within the last ``restart_window_s``."""
        self._counting = threading.Lock()
        self._training: WorkerGroup | None = None
        self._auxiliaries: list[WorkerGroup] = []
        self._published: WeightHandle | None = None
        self._stack = ExitStack()
        cluster = config.cluster
        context = WorkerContext(
            device=cluster.device,
            seed=config.seed,
            collective_timeout_s=cluster.worker_timeout_s,
            scratch=run_dir / "scratch",
        )
        self._launcher: Launcher
        if cluster.uses_ray:
            from nemorl.resources.ray_launcher import RayLauncher

            self._launcher = RayLauncher(config, context, run_dir / "logs")
        else:
            self._launcher = LocalLauncher(context)
        self._stack.callback(self._launcher.close)
        self._sampler = config.sampler

    def training_policy(self, planned_updates: int) -> TrainingPolicy:
        """The training policy, built on its devices; its learning rate decays over ``planned_updates``."""
        config = self.config
        policy = _planned(config.policy, planned_updates)
        factory = TrainingFactory(policy, config.needs_reference, config.policy_head)
        self._training = self._launcher.training_group(factory, f"training backend {_name(policy.backend)}")
        self._stack.callback(self._training.shutdown)
        return TrainingPolicy(self._training)

    def auxiliary_policy(self, role: str, auxiliary: AuxiliaryModel, planned_updates: int) -> TrainingPolicy:
        """Another model of the run, on the devices of the policy."""
        factory = TrainingFactory(_planned(auxiliary.policy, planned_updates), head=auxiliary.head)
        group = self._launcher.training_group(factory, f"{role} on {_name(auxiliary.policy.backend)}")
        self._stack.callback(group.shutdown)
        self._auxiliaries.append(group)
        return TrainingPolicy(group)

    def generation_policy(self) -> GenerationPolicy:
        """The generation policy: starts from the training policy's weights if there is one, else from disk."""
        config, sampler = self.config, self._sampler
        assert sampler is not None, "this kind of run samples nothing"
        generation = sampler.generation
        if sampler.is_attached and self._training is not None:
            engine = AttachedEngineFactory(generation, config.policy)
            # Lost with its trainer, and replaced with it: there is nothing to revive alone.
            return GenerationPolicy(self._launcher.attached_group(self._training, engine))
        weights = self.weight_handle(version=0) if self._training is not None else None
        # Engines may live where the trainer's package is not installed: its config does not travel there.
        policy = config.policy.model_copy(update={"backend": TrainingBackendConfig()})
        factory = GenerationFactory(generation, policy, weights)
        group = self._launcher.generation_group(factory, f"generation backend {_name(generation.backend)}")
        self._stack.callback(group.shutdown)

        def revive(error: WorkerLostError) -> None:
            self._count_restart(error)
            self._launcher.restart(group, replace(factory, weights=self._published))

        return GenerationPolicy(group, revive)

    def weight_handle(self, version: int) -> WeightHandle:
        """The training policy's current weights, over the transport that both sides declare."""
        assert self._training is not None, "weights were asked for before the training policy was built"
        assert self._sampler is not None, "nothing asks for weights where nothing samples"
        if self._sampler.is_attached:
            return in_process_handle(None, version)  # nothing travels
        assert self._sampler.transport is not None, "the config checks that the backends share a transport"
        self._published = self._training.publish(self._sampler.transport, version)
        return self._published

    def restart_training(self, error: WorkerLostError) -> None:
        """Replace the training workers, and those of auxiliary models, with fresh ones: all models go back together.

        They have initial weights, which a checkpoint must then overwrite.

        Raises:
            WorkerLostError: ``error`` itself, when the run has used up its restarts.
        """
        assert self._training is not None, "training workers were lost before there were any"
        self._count_restart(error)
        for group in (self._training, *self._auxiliaries):
            self._launcher.restart(group)

    def close(self) -> None:
        """Shut all workers down and give their devices back."""
        self._stack.close()

    def _count_restart(self, error: WorkerLostError) -> None:
        cluster = self.config.cluster
        with self._counting:  # the trainer and the rollouts may each notice a loss
            now = time.monotonic()
            while self._restarts and self._restarts[0] <= now - cluster.restart_window_s:
                self._restarts.popleft()
            if len(self._restarts) >= cluster.max_restarts:
                raise error
            self._restarts.append(now)
            self._on_restart(f"{error.message} (restart {len(self._restarts)} of {cluster.max_restarts})")


def standalone_generation(generation: GenerationConfig, policy: PolicyConfig) -> GenerationPolicy:
    """A generator of a model on disk, outside any run, in this process."""
    launcher = LocalLauncher(WorkerContext(device=ClusterConfig().device))
    factory = GenerationFactory(generation, policy, None)
    return GenerationPolicy(launcher.generation_group(factory, f"generation backend {_name(generation.backend)}"))


def _planned(policy: PolicyConfig, updates: int) -> PolicyConfig:
    """The policy with the length of its learning-rate decay filled in."""
    if policy.schedule.decay_steps is not None:
        return policy
    schedule = policy.schedule.model_copy(update={"decay_steps": updates})
    return policy.model_copy(update={"schedule": schedule})


def _name(backend: Any) -> str:
    """``DTensorConfig`` -> ``DTensor``: short, and findable in the plugin's source."""
    return type(backend).__name__.removesuffix("Config")
