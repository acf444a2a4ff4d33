"""ResourceManager: the one place that decides where worker groups run, and that replaces what is lost.

Algorithms ask it for policies; they never learn whether these share a process, a node or nothing at all. Runs that
sample have one that also places engines and sends them weights: ``nemorl_rl.placement.engines``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nemorl.config.models import AuxiliaryModel, Placement, PolicyConfig
from nemorl.config.run import RunConfig
from nemorl.contracts import RemarkingBackend, WorkerGroup
from nemorl.errors import WorkerLostError
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.policies import TrainingPolicy, Turn, always_there
from nemorl.resources.worker import (
    AttachedFactory,
    AttachedGroup,
    HostGroup,
    TrainingFactory,
    WorkerContext,
    WorkerFactory,
)

if TYPE_CHECKING:
    from nemorl.resources.ray_drain import DrainWatch


class Launcher(Protocol):
    """Puts worker groups somewhere."""

    def training_group(self, factory: TrainingFactory, name: str) -> HostGroup: ...

    def engine_group(self, factory: WorkerFactory, name: str) -> WorkerGroup:
        """The engines that ``RunConfig.sampler`` describes: independent replicas."""
        ...

    def attached_group(self, hosts: WorkerGroup, factory: AttachedFactory) -> WorkerGroup:
        """Engines in the processes of a group that this launcher made."""
        ...

    def restart(self, group: WorkerGroup, factory: WorkerFactory | None = None) -> None:
        """Replace the lost workers of a group that this launcher made."""
        ...

    @property
    def drains(self) -> DrainWatch | None:
        """Looks for nodes below its workers that are about to go; ``None``: they are nobody else's."""
        ...

    def close(self) -> None: ...


class LocalLauncher:
    """Everything in this process."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def training_group(self, factory: TrainingFactory, name: str) -> HostGroup:
        return LocalWorkerGroup(factory, self._context, name)

    def engine_group(self, factory: WorkerFactory, name: str) -> WorkerGroup:
        return LocalWorkerGroup(factory, self._context, name)

    def attached_group(self, hosts: WorkerGroup, factory: AttachedFactory) -> WorkerGroup:
        assert isinstance(hosts, LocalWorkerGroup), "the group was made by another launcher"
        hosts.attach_engine(factory)
        return AttachedGroup(hosts)

    def restart(self, group: WorkerGroup, factory: WorkerFactory | None = None) -> None:
        raise AssertionError("a worker in this process cannot be lost without it")

    drains = None

    def close(self) -> None:
        pass


class ResourceManager:
    """Builds and owns the worker groups of one run, on the launcher that ``cluster`` asks for."""

    policy_class: ClassVar[type[TrainingPolicy]] = TrainingPolicy

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        placement: Placement | None = None,
        on_restart: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            config: The run.
            run_dir: Its directory: worker logs go to ``logs/``.
            placement: Where its parts go. Unset: as the config says.
            on_restart: Told whenever workers were lost and are being replaced.
        """
        self.config, self.placement = config, placement or config.place()
        self._on_restart = on_restart
        self.reached = 0
        """Steps that the run has completed: a loss counts until there are more of them"""
        self._restarts: deque[tuple[float, int]] = deque()
        """Moments of ``time.monotonic()`` at which workers were replaced, and ``reached`` then"""
        self._counting = threading.Lock()
        self.training: HostGroup | None = None
        """The workers of the policy, once there are any."""
        self.auxiliaries: dict[str, HostGroup] = {}
        """The workers of other models, by role."""
        self._stack = ExitStack()
        cluster = config.cluster
        context = WorkerContext(
            device=cluster.device,
            seed=config.seed,
            collective_timeout_s=cluster.worker_timeout_s,
            scratch=run_dir / "scratch",
            leaves_memory=bool(self.placement.takes_turns),
        )
        self.launcher: Launcher
        if cluster.uses_ray:
            from nemorl.resources.ray_launcher import RayLauncher

            self.launcher = RayLauncher(config, self.placement, context, run_dir / "logs")
        else:
            self.launcher = LocalLauncher(context)
        self._stack.callback(self.launcher.close)

    def training_policy(self, planned_updates: int) -> TrainingPolicy:
        """The training policy, built on its devices; its learning rate decays over ``planned_updates``."""
        config = self.config
        policy = _planned(config.policy, planned_updates)
        factory = TrainingFactory(policy, config.needs_reference, config.policy_head)
        self.training = self.launcher.training_group(factory, f"training backend {short_name(policy.backend)}")
        self.own(self.training)
        by_trees, replays = "shared_prefixes" in policy.backend.supports, "routes" in policy.backend.asks_of_sampler
        return self.policy_class(self.training, self.turn_of("policy"), by_trees, replays)

    def auxiliary_policy(self, role: str, auxiliary: AuxiliaryModel, planned_updates: int) -> TrainingPolicy:
        """Another model of the run, on the devices of the policy."""
        factory = TrainingFactory(_planned(auxiliary.policy, planned_updates), head=auxiliary.head)
        self.own(group := self.launcher.training_group(factory, f"{role} on {short_name(auxiliary.policy.backend)}"))
        self.auxiliaries[role] = group
        return TrainingPolicy(group, self.turn_of(role), "shared_prefixes" in auxiliary.policy.backend.supports)

    def remarks(self) -> list[str]:
        """Remarks of the policy's backend on how it was built."""
        if self.training is None or "remarks" not in self.config.policy.backend.supports:
            return []
        return list(self.training.call(RemarkingBackend.remarks)[0])

    def turn_of(self, role: str) -> Turn:
        """How a model gets the devices when it works: it has them always."""
        return always_there

    def own(self, group: WorkerGroup) -> WorkerGroup:
        """``group``, which is shut down when this is closed."""
        self._stack.callback(group.shutdown)
        return group

    def replace_training(self) -> None:
        """Start the training workers and those of auxiliary models anew: all models go back together.

        They have initial weights, which a checkpoint must then overwrite.
        """
        for group in self._learners:
            self.launcher.restart(group)

    @property
    def _learners(self) -> list[HostGroup]:
        return [group for group in (self.training, *self.auxiliaries.values()) if group is not None]

    @contextmanager
    def moving(self) -> Iterator[bool]:
        """Workers leave the nodes that are about to go. Engines there end at once, and are back after the block.

        Yields:
            Whether training workers have to leave too: in the block they are replaced, and get their weights again.
        """
        drains = self.launcher.drains
        assert drains is not None, "it has told of nodes that are about to go"
        drains.take_fresh_places()
        try:
            yield any(drains.is_displaced(group) for group in self._learners)
        finally:
            drains.leave_old_places()

    def close(self) -> None:
        """Shut all workers down and give their devices back."""
        self._stack.close()

    def count_restart(self, error: WorkerLostError) -> None:
        """Workers are about to be replaced.

        Raises:
            WorkerLostError: ``error`` itself, when the run has used up its restarts.
        """
        cluster = self.config.cluster
        with self._counting:  # the trainer and the rollouts may each notice a loss
            now = time.monotonic()
            while self._restarts:
                then, reached = self._restarts[0]
                if then > now - cluster.restart_window_s or reached == self.reached:
                    break
                self._restarts.popleft()
            if len(self._restarts) >= cluster.max_restarts:
                raise error
            self._restarts.append((now, self.reached))
            self._on_restart(f"{error.message} (restart {len(self._restarts)} of {cluster.max_restarts})")


def _planned(policy: PolicyConfig, updates: int) -> PolicyConfig:
    """The policy with the lengths of its learning-rate schedule filled in."""
    return policy.model_copy(update={"schedule": policy.schedule.planned(updates)})


def short_name(backend: Any) -> str:
    """``DTensorConfig`` -> ``DTensor``: short, and findable in the plugin's source."""
    return type(backend).__name__.removesuffix("Config")
