"""An engine over several GPUs sees all of them, and trainers on the same places one each. The GPUs are Ray's word for
it: nothing here computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray
from nemorl.config import ClusterConfig
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_workers import GroupSettings, RayWorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.slow]
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

from workers import Seeing  # noqa: E402  (worker processes find it through PYTHONPATH)


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
