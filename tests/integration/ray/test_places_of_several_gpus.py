"""An engine over several GPUs sees all of them, and trainers on the same places one each. The GPUs are Ray's word for
it: nothing here computes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import psutil
import pytest
import ray
from nemorl.config import ClusterConfig
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_ranks import GroupSettings
from nemorl.resources.ray_workers import RayWorkerGroup
from workers import Seeing, Spread

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayVirtualCluster]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(ray, "init", partial(ray.init, num_gpus=4))
    config = ClusterConfig(launcher="ray", gpus_per_node=4, cpus_per_worker=0.25, placement_timeout_s=30)
    reserved = RayVirtualCluster([4], config)
    yield reserved
    reserved.shutdown()


@pytest.mark.full
def test_engines_see_the_gpus_of_the_places_they_spread_over(cluster: RayVirtualCluster) -> None:
    trainers = RayWorkerGroup(cluster, Seeing, settings=GroupSettings(name="trainers", share=0.5))
    settings = GroupSettings(name="engines", share=0.5, is_spmd=False, workers=2, places_per_worker=2)
    engines = RayWorkerGroup(cluster, Seeing, settings=settings)
    seen, ids = engines.call(Seeing.visible), trainers.call(Seeing.visible)
    assert sorted(ids) == ["4", "5", "6", "7"]
    assert seen == [",".join(ids[:2]), ",".join(ids[2:])]

    # One that died comes back with the same GPUs.
    ray.kill(engines._ranks[1].actor)
    engines.restart()
    assert engines.call(Seeing.visible) == seen
    for group in (engines, trainers):
        group.shutdown()


@pytest.mark.full
def test_an_engine_over_two_nodes_has_a_process_and_the_gpus_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "200")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 4})
    nodes.add_node(num_cpus=1, num_gpus=4)
    nodes.wait_for_nodes()
    config = ClusterConfig(
        launcher="ray", address=nodes.address, security={"plaintext": True}, num_nodes=2, gpus_per_node=2,
        cpus_per_worker=0.1,
    )  # fmt: skip
    shared = RayVirtualCluster([2, 2], config)
    apart = RayVirtualCluster([1, 1], config, devices_per_worker=2)  # a place is a node's part of an engine
    try:
        trainers = RayWorkerGroup(shared, Seeing, settings=GroupSettings(name="trainers", share=0.5))
        by_rank = trainers.call(Seeing.where)
        for cluster, share, width in ((shared, 0.5, 4), (apart, 1.0, 2)):
            settings = GroupSettings(name="engine", share=share, is_spmd=False, workers=1, places_per_worker=width)
            engine = RayWorkerGroup(cluster, Spread, settings=settings)
            (places,) = engine.call(Spread.all_places)
            assert len({node for node, _ in places}) == 2
            assert [len(set(gpus.split(","))) for _, gpus in places] == [2, 2]
            if cluster is shared:  # the GPUs of the trainers' ranks 0 and 1, and of 2 and 3
                pairs = (by_rank[:2], by_rank[2:])
                assert places == [(pair[0][0], ",".join(gpu for _, gpu in pair)) for pair in pairs]

            # The process on the further node ends with its engine, and comes back with it.
            ((before,),) = engine.call(Spread.further_pids)
            ray.kill(engine._ranks[0].actor)
            engine.restart()
            assert engine.call(Spread.all_places) == [places]
            assert not psutil.pid_exists(before) or psutil.Process(before).status() == psutil.STATUS_ZOMBIE
            engine.shutdown()
        trainers.shutdown()
    finally:
        apart.shutdown()
        shared.shutdown()
        ray.shutdown()
        nodes.shutdown()
