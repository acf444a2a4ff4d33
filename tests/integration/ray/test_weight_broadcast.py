"""The transport ``nccl`` between real workers, over gloo: a sharded trainer sends to two generators."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from nemorl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemorl.contracts import GenerationBackend
from nemorl.errors import WorkerLostError
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_ranks import GroupSettings
from nemorl.resources.ray_workers import RayWorkerGroup
from nemorl.resources.worker import TrainingFactory
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl_rl.placement.engines import GenerationFactory, standalone_generation
from nemorl_testing.models import tiny_model
from recorded_messages import Raises

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]

CPU = ClusterConfig(
    launcher="ray", workers_per_node=4, cpus_per_worker=0.25, placement_timeout_s=30, worker_timeout_s=300
)
REQUEST = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=8), (1, 2))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayVirtualCluster]:
    reserved = RayVirtualCluster([4], CPU)
    yield reserved
    reserved.shutdown()


def answers(generators: RayWorkerGroup) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Of each replica: its weights' version, and the tokens of its responses to one request."""
    return [
        (group[0].weight_version, tokens(group)) for (group,) in generators.call(GenerationBackend.generate, [REQUEST])
    ]


def tokens(group: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in group]


def from_disk(policy: PolicyConfig) -> list[tuple[int, ...]]:
    """The same responses from the weights that the trainer began with, and has not changed."""
    generator = standalone_generation(GenerationConfig(), policy)
    (group,) = generator.generate([REQUEST])
    generator.shutdown()
    return tokens(group)


@pytest.mark.full
def test_a_sharded_trainer_sends_to_two_generators_and_to_one_that_is_replaced(
    cluster: RayVirtualCluster, tmp_path: Path, raises: Raises
) -> None:
    policy = PolicyConfig(model_name=str(tiny_model()), max_sequence_tokens=64)
    settings = GroupSettings(name="trainers", share=0.5, workers=2, log_folder=tmp_path)
    # Two ranks: FSDP's own process group is the default one of the process that sends.
    trainers = RayWorkerGroup(cluster, TrainingFactory(policy, False), settings=settings)
    first = trainers.publish("nccl", 1)
    settings = GroupSettings(name="generators", share=0.5, workers=2, is_spmd=False, log_folder=tmp_path)
    generators = RayWorkerGroup(cluster, GenerationFactory(GenerationConfig(), policy, first), settings=settings)
    expected = from_disk(policy)
    assert answers(generators) == [(1, expected), (1, expected)]

    second = trainers.publish("nccl", 2)
    generators.call(GenerationBackend.update_weights, second, 2)
    assert answers(generators) == [(2, expected), (2, expected)]

    os.kill(generators.facts[1].pid, signal.SIGKILL)
    with raises(WorkerLostError, "generators", 1):
        generators.call(GenerationBackend.update_weights, second, 2)
    generators.restart(GenerationFactory(GenerationConfig(), policy, second))
    assert answers(generators) == [(2, expected), (2, expected)]
    generators.shutdown()
    trainers.shutdown()
