"""The resources of a run that samples: besides training workers, engines that take the policy's weights from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemorl.config.cluster import ClusterConfig
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.contracts import PublishesPieces, RemarkingBackend, RequestBackend, WorkerGroup
from nemorl.errors import WorkerLostError
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl.resources.manager import LocalLauncher, short_name
from nemorl.resources.worker import SUBMITTED_CALLS, WorkerContext, WorkerHost
from nemorl.weights import WeightHandle, in_process_handle

from nemorl_rl.agents.contract import CONSTRAINED
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.placement.tenant_resources import TenantResources
from nemorl_rl.placement.tenants import DRAFT, ENGINE, ROLLOUT, SYNC, TRAIN, WRITES, EngineTenant, Phase, PhaseGate
from nemorl_rl.serving.generation_policy import REPORTS, GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests
from nemorl_rl.serving.snapshots import held_versions, takes_versions

if TYPE_CHECKING:
    from nemorl.contracts import GenerationBackend, TrainingBackend

    from nemorl_rl.placement.fleet import EngineFleet
    from nemorl_rl.placement.lent_engines import LentEngines

Revive = Callable[[WorkerLostError], None]
"""Has a lost engine replaced, or raises the error that it is given."""


@dataclass(frozen=True)
class GenerationFactory:
    """Builds one engine, in its worker process."""

    generation: GenerationConfig
    policy: PolicyConfig
    weights: WeightHandle | None

    def __call__(self, context: WorkerContext) -> GenerationBackend:
        engine = self.generation.backend.build(self.generation, self.policy, context, self.weights)
        if "submit" not in self.generation.backend.supports:
            return engine
        return NamedRequests(cast("RequestBackend", engine))


@dataclass(frozen=True)
class AttachedEngineFactory:
    """Builds an engine in the process of a trainer, over its weights."""

    generation: GenerationConfig
    policy: PolicyConfig

    def __call__(self, trainer: TrainingBackend, context: WorkerContext) -> GenerationBackend:
        return self.generation.backend.build_in(trainer, self.generation, self.policy, context)


class RolloutResources(TenantResources):
    """Decides, besides, where engines run and how weights travel to them."""

    config: RolloutRunConfig

    def __init__(
        self, config: RolloutRunConfig, run_dir: Path, *, on_restart: Callable[[str], None] = lambda _: None
    ) -> None:
        self._published: WeightHandle | None = None
        """The newest weights, as long as they can be fetched."""
        self._version = 0
        self._engine_remarks: list[str] = []
        self._absence: Callable[[], AbstractContextManager[None]] = nullcontext
        """Engines that are displaced end as its block begins, and are started anew as it ends. Those of a fleet leave
        by themselves."""
        self._fleet: EngineFleet | None = None
        """The engines, where each has devices of its own"""
        self._scratch = run_dir / "scratch"
        self._has_noted = False
        super().__init__(config, run_dir, on_restart=on_restart)
        placement, tenancy = self.placement, self._tenancy
        # An update that brings all weights, of the only version that there is, leaves nothing to keep.
        is_whole = placement.form == "model" and held_versions(config.generation.backend) == 1
        self._forgets = tenancy is not None and is_whole and not placement.is_attached
        """The engine keeps no copy of its weights while the policy learns."""
        self._gate = PhaseGate(config.cluster.worker_timeout_s) if tenancy is None else tenancy.gate

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        if (self.placement.shares_weights or self._forgets) and phase in (ROLLOUT, *WRITES):
            return self._apart(phase)
        return super()._during(phase)

    @contextmanager
    def _apart(self, phase: Phase) -> Iterator[None]:
        """Nothing is sampled from weights that are being written, where the engine runs on the trainer's own or has
        forgotten those before; nor from those of a step before they are published under a version."""
        # A tenancy passes through the same gate by itself.
        alone = self._gate.during(phase) if self._tenancy is None else nullcontext()
        with alone, super()._during(phase):
            if phase == TRAIN:
                self._gate.bar(ROLLOUT)
            yield

    def _has_new_weights(self) -> None:
        """Every engine has the newest weights, under their version."""
        self._gate.admit(ROLLOUT)
        self._withdraw()

    def replace_training(self) -> None:
        if self._tenancy is not None and not self.placement.shares_weights:
            self._tenancy.send_away(ENGINE)
        super().replace_training()

    @contextmanager
    def moving(self) -> Iterator[bool]:
        with super().moving() as moves_training, self._absence():
            if moves_training:
                self._published = None  # its holder is about to end
            yield moves_training

    def generation_policy(self) -> GenerationPolicy:
        """The generation policy: starts from the training policy's weights if there is one, else from disk."""
        config, generation = self.config, self.config.generation
        if self.placement.is_attached and self.training is not None:
            with self._during(SYNC):
                engine = AttachedEngineFactory(generation, config.policy)
                attached = self.launcher.attached_group(self.training, engine)
            self._admit_engine(EngineTenant(attached))
            # Lost with its trainer, and replaced with it: there is nothing to revive alone.
            return GenerationPolicy(attached, turn=self._during, on_update=self._has_new_weights)
        weights = self.weight_handle(version=0) if self.training is not None else None
        # Engines may live where the trainer's package is not installed: its config does not travel there.
        bare = config.policy.model_copy(update={"backend": TrainingBackendConfig()})
        factory = GenerationFactory(generation, bare, weights)
        name = f"generation backend {short_name(generation.backend)}"
        group, revive = self._fleet_of(factory, name) or self._fixed_group(factory, name)
        self._withdraw()
        fleet, able = self._fleet, generation.backend.supports
        if "remarks" in able:
            self._engine_remarks += group.call(RemarkingBackend.remarks)[0]
        policy = GenerationPolicy(
            group,
            revive,
            self._during,
            on_update=self._has_new_weights,
            single_requests=_request_limits(generation, config.cluster),
            reports=REPORTS in able,
            takes_versions=takes_versions(generation.backend, self.placement.form),
            constrains=CONSTRAINED in able,
            ranks=None if fleet is None else lambda: fleet.ranks,
            joined=lambda: 0 if fleet is None else fleet.joined,
        )
        if fleet is None:
            self._absence = partial(self._absent, group, factory, policy)
        return policy

    def _fixed_group(self, factory: GenerationFactory, name: str) -> tuple[WorkerGroup, Revive]:
        """Engines whose number stays; all wait for a lost one's replacement."""
        with self._during(SYNC):
            group = self.own(self.launcher.engine_group(factory, name))
        self._admit_engine(EngineTenant(group))

        def revive(error: WorkerLostError) -> None:
            self.count_restart(error)
            self._begin_anew(group, factory)

        return group, revive

    def _begin_anew(self, group: WorkerGroup, factory: GenerationFactory) -> None:
        self.launcher.restart(group, replace(factory, weights=self._newest()))
        self._admit_engine(EngineTenant(group))
        self._withdraw()

    @contextmanager
    def _absent(self, group: WorkerGroup, factory: GenerationFactory, policy: GenerationPolicy) -> Iterator[None]:
        drains = self.launcher.drains
        if drains is None or not drains.is_displaced(group):
            yield
            return
        with policy.replacing():
            drains.retire(group)
            if self._tenancy is not None:
                self._tenancy.dismiss(ENGINE)
            yield
            self._begin_anew(group, factory)

    def _fleet_of(self, factory: GenerationFactory, name: str) -> tuple[WorkerGroup, Revive] | None:
        """Engines that come and go, where each has devices of its own; else ``None``."""
        cluster = self.config.cluster
        if not cluster.uses_ray or cluster.colocated:
            return None
        from nemorl.resources.ray_launcher import RayLauncher

        from nemorl_rl.placement.fleet import EngineFleet
        from nemorl_rl.placement.fleet_engine import Source
        from nemorl_rl.placement.fleet_keeper import FleetKeeper
        from nemorl_rl.placement.fleet_orders import FOLDER

        assert isinstance(self.launcher, RayLauncher), "cluster.uses_ray says so"
        if not self.launcher.has_single_engines:
            return None
        source = Source(self.launcher, name, lambda weights: replace(factory, weights=weights), self._newest)
        fleet = EngineFleet(
            source,
            max_restarts=cluster.max_restarts,
            restart_window_s=cluster.restart_window_s,
            patience_s=cluster.placement_timeout_s + cluster.worker_timeout_s,
            warn=self._on_restart,
            remark=self._engine_remarks.append,
        )
        self.own(fleet)
        fleet.start(cluster.generation_replicas(self.config.generation.backend.devices_per_replica))
        if cluster.lend_training_devices:
            from nemorl_rl.placement.lent_engines import LentEngines, LentPlaces

            trainer, share = self.launcher.training_places
            lent = LentEngines(fleet, partial(self._during, SYNC))
            fleet.start_on(LentPlaces.of(trainer, self.config.generation.backend.devices_per_replica, share), lent)
            self._admit_engine(lent)
        self._fleet = fleet
        FleetKeeper(fleet, self._scratch / FOLDER.name, lambda: {"backend": name, "weights": self._version})
        return fleet, fleet.await_engine

    def new_remarks(self) -> Sequence[str]:
        found = [self._engine_remarks.pop(0) for _ in range(len(self._engine_remarks))]  # another thread may add some
        return [*found, *super().new_remarks()]

    def weight_handle(self, version: int, *, digests: bool = False) -> WeightHandle:
        """The training policy's current weights, and those of a draft that learns beside it, over the transport that
        both sides declare; with digests of the policy's."""
        assert self.training is not None, "weights were asked for before the training policy was built"
        if self.placement.is_attached:
            return in_process_handle(None, version)  # nothing travels
        assert self.placement.transport is not None, "the config checks that the backends share a transport"
        transport, draft = self.placement.transport, self.auxiliaries.get(DRAFT)
        with self._during(SYNC):
            self._published = self._publish(self.training, transport, version, digests)
            if draft is not None:
                from nemorl_tensors.engines.drafted import DraftedHandle

                self._published = DraftedHandle.of(self._published, draft.publish(transport, version))
        self._version = version
        self._note_transport(self._published.payload)
        return self._published

    def _note_transport(self, payload: Any) -> None:
        """Tell once of what a transport of changes had to do otherwise."""
        from nemorl_rl.transports.delta.counts import CountedPayload

        if isinstance(payload, CountedPayload) and (remark := payload.remark()) is not None and not self._has_noted:
            self._has_noted = True
            self._engine_remarks.append(remark)

    def _publish(self, training: WorkerGroup, transport: str, version: int, digests: bool) -> WeightHandle:
        if not self.placement.spreads_weights and not digests:
            return training.publish(transport, version, self.placement.form)
        if not self.placement.spreads_weights:
            from nemorl_tensors.engines.digests import digested

            return training.publish(transport, version, self.placement.form, digested)
        from nemorl_tensors.engines.pieces import spread_handle

        asked = {"digests": True} if digests else {}
        return spread_handle(transport, version, training.call(PublishesPieces.publish_pieces, transport, **asked))

    def _withdraw(self) -> None:
        """Every engine has the published weights: the memory that they take on a device shared with it is released."""
        is_lent = self.placement.copies_on_device and self.config.cluster.shares_devices
        if is_lent and self._published is not None:
            assert self.training is not None, "somebody published them"
            if self.placement.spreads_weights:
                self.training.call(PublishesPieces.withdraw_pieces)
            else:
                self.training.call_as("host", WorkerHost.withdraw)
            if DRAFT in self.auxiliaries:
                self.auxiliaries[DRAFT].call_as("host", WorkerHost.withdraw)
            self._published = None

    def _newest(self) -> WeightHandle | None:
        """The weights for an engine that is built anew."""
        if self._published is None and self.training is not None:
            return self.weight_handle(self._version)
        return self._published

    def _admit_engine(self, tenant: EngineTenant | LentEngines) -> None:
        if self._tenancy is not None and "sleep" in self.config.generation.backend.supports:
            forgets = {TRAIN: tenant.forget} if self._forgets else None
            self._tenancy.admit(ENGINE, tenant, ("weights", "cache"), forgets=forgets)


def standalone_generation(
    generation: GenerationConfig, policy: PolicyConfig, weights: WeightHandle | None = None
) -> GenerationPolicy:
    """A generator outside any run, in this process: of a model on disk, or of weights that are handed over."""
    launcher = LocalLauncher(WorkerContext(device=ClusterConfig().device))
    factory = GenerationFactory(generation, policy, weights)
    group = launcher.engine_group(factory, f"generation backend {short_name(generation.backend)}")
    limits = _request_limits(generation, ClusterConfig())
    return GenerationPolicy(
        group,
        single_requests=limits,
        takes_versions=takes_versions(generation.backend, "model" if weights is None else weights.form),
        constrains=CONSTRAINED in generation.backend.supports,
    )


def _request_limits(generation: GenerationConfig, cluster: ClusterConfig) -> RequestLimits | None:
    if "submit" not in generation.backend.supports:
        return None
    return RequestLimits(SUBMITTED_CALLS, cluster.worker_timeout_s)
