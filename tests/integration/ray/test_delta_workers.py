"""Changes of the weights between real workers: a sharded trainer, two generators, and one that replaces a lost one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from nemorl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemorl.contracts import GenerationBackend, ProvingBackend
from nemorl.errors import WorkerLostError
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_ranks import GroupSettings
from nemorl.resources.ray_workers import RayWorkerGroup
from nemorl.resources.worker import TrainingFactory
from nemorl_rl.placement.engines import GenerationFactory
from nemorl_tensors.engines.digests import digested
from nemorl_testing.models import tiny_model
from recorded_messages import Raises

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]

CPU = ClusterConfig(
    launcher="ray", workers_per_node=4, cpus_per_worker=0.25, placement_timeout_s=30, worker_timeout_s=300
)


@pytest.mark.full
def test_generators_are_brought_what_has_changed_and_one_that_is_replaced_a_base(
    tmp_path: Path, raises: Raises
) -> None:
    cluster = RayVirtualCluster([4], CPU)
    policy = PolicyConfig(model_name=str(tiny_model()), max_sequence_tokens=64, precision="bfloat16")
    settings = GroupSettings(name="trainers", share=0.5, workers=2, log_folder=tmp_path)
    trainers = RayWorkerGroup(cluster, TrainingFactory(policy, False), settings=settings)
    first = trainers.publish("delta_socket", 1)
    settings = GroupSettings(name="generators", share=0.5, workers=2, is_spmd=False, log_folder=tmp_path)
    generators = RayWorkerGroup(cluster, GenerationFactory(GenerationConfig(), policy, first), settings=settings)

    second = trainers.publish("delta_socket", 2, "model", digested)
    assert second.digests
    read = generators.call(GenerationBackend.update_weights, second, 2)
    assert generators.call(ProvingBackend.held_digests, list(second.digests)) == [dict(second.digests)] * 2

    os.kill(generators.facts[1].pid, signal.SIGKILL)
    third = trainers.publish("delta_socket", 3, "model", digested)
    with raises(WorkerLostError, "generators", 1):
        generators.call(GenerationBackend.update_weights, third, 3)
    generators.restart(GenerationFactory(GenerationConfig(), policy, third))
    again = generators.call(GenerationBackend.update_weights, third, 3)
    assert generators.call(ProvingBackend.held_digests, list(second.digests)) == [dict(second.digests)] * 2
    counts = trainers.publish("delta_socket", 4).payload.counts
    assert (counts.fallbacks, counts.why) == (0, "")
    assert (counts.wholes, counts.changes) == (2 + 1, 2 + 1)  # the one that was replaced had nothing to change
    assert read[0] == read[1] > 0
    assert again == [0, 0]  # held since they were built
    generators.shutdown()
    trainers.shutdown()
    cluster.shutdown()
