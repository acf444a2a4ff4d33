"""Two workers of one core between them, and the folder in which worker processes find what they are made of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

from forked_workers import begun_by
from workers import CPU, Adder

if TYPE_CHECKING:
    from nemorl.resources.ray_cluster import RayVirtualCluster
    from nemorl.resources.ray_workers import RayWorkerGroup


@pytest.fixture(scope="module")
def cluster(python_of_workers: Path) -> Iterator[RayVirtualCluster]:
    import ray
    from nemorl.resources.ray_cluster import RayVirtualCluster

    with begun_by(python_of_workers):
        reserved = RayVirtualCluster([2], CPU)
    yield reserved
    reserved.shutdown()
    assert not ray.is_initialized(), "the private cluster outlived the one who began it"


@pytest.fixture
def group(cluster: RayVirtualCluster, tmp_path: Path) -> Iterator[RayWorkerGroup]:
    from nemorl.resources.ray_ranks import GroupSettings
    from nemorl.resources.ray_workers import RayWorkerGroup

    made = RayWorkerGroup(cluster, Adder, settings=GroupSettings(name="adders", log_folder=tmp_path))
    yield made
    made.shutdown()
