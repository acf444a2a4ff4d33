"""Worker groups of one run on Ray: which places each gets, and what its processes share."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ray.exceptions import RayError

from nemorl.config.cluster import ClusterConfig
from nemorl.config.models import GenerationConfig, Placement
from nemorl.config.run import RunConfig
from nemorl.contracts import WorkerGroup
from nemorl.errors import ResourceError
from nemorl.resources.ray_cluster import Places, RayVirtualCluster
from nemorl.resources.ray_drain import DrainWatch, draining_nodes, settle
from nemorl.resources.ray_errors import FIXES, in_words, token_of_the_driver_alone_named
from nemorl.resources.ray_ranks import GroupSettings
from nemorl.resources.ray_session import RaySession
from nemorl.resources.ray_workers import RayWorkerGroup
from nemorl.resources.worker import (
    SUBMITTED_CALLS,
    AttachedFactory,
    AttachedGroup,
    HostGroup,
    TrainingFactory,
    WorkerContext,
    WorkerFactory,
)


class RayLauncher:
    """Reserves all devices of the run at once, then puts groups on them."""

    def __init__(self, config: RunConfig, placement: Placement, context: WorkerContext, log_folder: Path) -> None:
        self._config, self._context = config, context
        self._stack = ExitStack()
        cluster, sampler = config.cluster, config.sampler
        width = 1 if sampler is None else sampler.backend.devices_per_replica
        is_shared = sampler is not None and cluster.shares_devices and not placement.is_attached
        self._log_folder = log_folder
        # Groups on one place take turns: each reserves an equal part of it.
        self._training_share = 1.0 / (1 + len(config.auxiliary_models) + is_shared)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._stack.callback(RaySession(cluster).close)
            apart = 0 if cluster.colocated or sampler is None else cluster.generation_replicas(width) * width
            training, generation = split_devices(cluster.num_nodes, cluster.devices_per_node, apart)
            self._training = RayVirtualCluster([count for count in training if count], cluster, role="training")
            self._stack.callback(self._training.shutdown)
            self._generation, self._engine_places = self._training, width
            self.has_single_engines = 0 < width <= cluster.devices_per_node and apart > 0
            self._unused: list[RayVirtualCluster] = []
            if self.has_single_engines:
                self._unused = self._single_places(apart // width, cluster)
            elif apart:
                on_node = min(width, cluster.devices_per_node)  # of one engine
                places = [count // on_node for count in generation if count]
                self._generation = RayVirtualCluster(places, cluster, devices_per_worker=on_node, role="generation")
                self._engine_places = width // on_node
                self._stack.callback(self._generation.shutdown)
            # Where an address is given, nodes are others', and may be wanted back.
            watched = list(dict.fromkeys((self._training, self._generation)))
            self.drains = None if cluster.address is None else DrainWatch(watched)
            undo.pop_all()

    @token_of_the_driver_alone_named()
    def training_group(self, factory: TrainingFactory, name: str) -> HostGroup:
        policy = factory.policy
        settings = GroupSettings(
            share=self._training_share,
            log_folder=self._log_folder,
            name=name,
            shards=policy.backend.data_shards(policy, self._training.world_size),
            python=policy.interpreter,
            modules=(*policy.backend.requires_modules, *self._algorithm_package()),
        )
        return RayWorkerGroup(self._training, factory, self._context, settings)

    @token_of_the_driver_alone_named()
    def engine_group(self, factory: WorkerFactory, name: str) -> WorkerGroup:
        width = self._sampler.backend.devices_per_replica
        settings = replace(
            self._engine_settings(name),
            share=self._training_share if self._generation is self._training else 1.0,
            places_per_worker=self._engine_places,
            workers=self._config.cluster.generation_replicas(width),
        )
        return RayWorkerGroup(self._generation, factory, self._context, settings)

    def reserve_engine(self, wait_s: float) -> RayVirtualCluster:
        """Devices of one engine, which it gives back alone: first those that the run began with, then others."""
        if self._unused:
            return self._unused.pop(0)
        cluster = self._config.cluster.model_copy(update={"placement_timeout_s": wait_s})
        return self._single_places(1, cluster)[0]

    @property
    def training_places(self) -> tuple[RayVirtualCluster, float]:
        """The trainer's, and the part of each that every group there reserves."""
        return self._training, self._training_share

    @token_of_the_driver_alone_named()
    def start_engine(self, devices: Places, factory: WorkerFactory, name: str, number: int) -> WorkerGroup:
        """An engine on all of these devices, as a group of one."""
        settings = replace(
            self._engine_settings(name),
            first=number,
            share=devices.share,
            places_per_worker=devices.world_size,
            workers=1,
        )
        return RayWorkerGroup(devices, factory, self._context, settings)

    def _single_places(self, count: int, cluster: ClusterConfig) -> list[RayVirtualCluster]:
        width = self._sampler.backend.devices_per_replica
        found = RayVirtualCluster.single_places(count, cluster, devices_per_worker=width, role="generation")
        for devices in found:
            self._stack.callback(devices.shutdown)
        return found

    @property
    def _sampler(self) -> GenerationConfig:
        assert self._config.sampler is not None, "this kind of run samples nothing"
        return self._config.sampler

    def _engine_settings(self, name: str) -> GroupSettings:
        generation = self._sampler
        supports = generation.backend.supports
        return GroupSettings(
            log_folder=self._log_folder,
            name=name,
            is_spmd=False,
            python=generation.interpreter,
            modules=generation.backend.requires_modules,
            # An update must be able to reach an engine that is generating.
            concurrent_calls=1 + ("in_flight_updates" in supports) + SUBMITTED_CALLS * ("submit" in supports),
        )

    def _algorithm_package(self) -> list[str]:
        """Losses travel by name, so it must be where the trainer is. What a script defines travels by value."""
        package = self._config.trainer.partition(":")[0].partition(".")[0]
        return [package] if package not in ("", "__main__") else []

    def attached_group(self, hosts: WorkerGroup, factory: AttachedFactory) -> WorkerGroup:
        assert isinstance(hosts, RayWorkerGroup), "the group was made by another launcher"
        hosts.attach_engine(factory)
        return AttachedGroup(hosts)

    def restart(self, group: WorkerGroup, factory: WorkerFactory | None = None) -> None:
        assert isinstance(group, RayWorkerGroup), "the group was made by another launcher"
        try:
            if self.drains is not None and isinstance(group.cluster, RayVirtualCluster):
                settle(group.cluster)
            group.restart(factory)
        except RayError as error:  # its GCS died, and came back empty
            raise ResourceError(f"the Ray cluster was lost: {in_words(error)}", fix=FIXES["cluster"]) from error

    def leaving_nodes(self) -> Collection[str]:
        """Ids of the nodes that the cluster is about to take away."""
        return (self.drains and draining_nodes()) or ()

    def close(self) -> None:
        self._stack.close()


def split_devices(num_nodes: int, per_node: int, apart: int) -> tuple[list[int], list[int]]:
    """Devices of each node for training and for generation, which takes ``apart`` of them from the last nodes.

    Example:
        >>> split_devices(2, 8, 4)
        ([8, 4], [0, 4])
    """
    generation = [0] * num_nodes
    for node in reversed(range(num_nodes)):
        generation[node] = min(per_node, apart - sum(generation))
    return [per_node - count for count in generation], generation
