"""Two nodes (of one machine): places are on different nodes, and weights cross between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from forked_workers import begun_by
from nemorl.config import ClusterConfig
from nemorl.errors import ResourceError
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_session import RaySession
from recorded_messages import Raises
from small_runs import length, losses, node_of, train, weights

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PLAIN = {"plaintext": True}
"""What an address of this machine beyond its loopback asks for: this cluster has no certificates."""


@pytest.fixture(scope="module")
def address(python_of_workers: Path) -> Iterator[str]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with begun_by(python_of_workers):
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
            cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
        yield cluster.address
        ray.shutdown()
        cluster.shutdown()


def test_each_nodes_places_are_on_a_node_of_their_own(address: str) -> None:
    config = ClusterConfig(launcher="ray", address=address, security=PLAIN, num_nodes=2, workers_per_node=1)
    cluster = RayVirtualCluster([1, 1], config)
    assert len({node_of(place) for place in cluster.places}) == 2
    cluster.shutdown()


def test_a_request_that_only_the_sum_of_nodes_could_hold_is_refused(address: str, raises: Raises) -> None:
    config = ClusterConfig(launcher="ray", address=address, security=PLAIN, workers_per_node=2)
    with raises(ResourceError, 1, 2, varies=r"[\w.-]+(?=: 1 CPU)"):
        RayVirtualCluster([2], config)


def test_a_second_cluster_is_refused_while_connected_to_a_first(address: str, raises: Raises) -> None:
    cluster = RayVirtualCluster([1], ClusterConfig(launcher="ray", address=address, security=PLAIN))
    with raises(ResourceError, address, "cluster.address", "10.0.0.1:1"):
        RaySession(ClusterConfig(launcher="ray", address="10.0.0.1:1"))
    cluster.shutdown()


def test_training_and_generation_on_two_nodes_give_the_numbers_of_one_process(
    address: str, tiny_model: Path, tmp_path: Path
) -> None:
    apart: dict[str, Any] = {
        "address": address,
        "security": PLAIN,
        "num_nodes": 2,
        "workers_per_node": 1,
        "colocated": False,
    }
    one, two = (
        train(tiny_model, tmp_path / name, cluster, reward=length, max_steps=3)
        for name, cluster in (("one", {}), ("two", apart))
    )
    assert losses(one) == losses(two)
    assert weights(one) == weights(two)


@pytest.mark.full
def test_neighbouring_ranks_are_on_nodes_of_one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    ray.shutdown()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for segment in (0, 1, 0, 1):
        nodes.add_node(num_cpus=1, resources={f"segment_{segment}": 1})
    nodes.wait_for_nodes()
    config = ClusterConfig(launcher="ray", address=nodes.address, security=PLAIN, num_nodes=4, workers_per_node=1)
    cluster = RayVirtualCluster([1] * 4, config)
    try:
        segments = {node["NodeID"]: {"segment_0", "segment_1"} & node["Resources"].keys() for node in ray.nodes()}
        found = [segments[node_of(place)] for place in cluster.places]
        assert found == [{"segment_0"}] * 2 + [{"segment_1"}] * 2
        assert [place.node for place in cluster.places] == [0, 1, 2, 3]
    finally:
        cluster.shutdown()
        ray.shutdown()
        nodes.shutdown()
