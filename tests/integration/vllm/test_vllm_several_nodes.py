"""One engine over two nodes (of one machine): the same numbers, weights that reach both, and a node that is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from nemorl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemorl.contracts import GenerationBackend
from nemorl.errors import WorkerLostError
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_ranks import GroupSettings
from nemorl.resources.ray_workers import RayWorkerGroup
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, transport
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig
from nemorl_rl.placement.engines import GenerationFactory
from nemorl_testing.models import load_reference, tiny_model
from vllm_engines import KV_CACHE_GIB, changed, gaps

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

PLAIN = {"plaintext": True}
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.7)
REQUESTS = [GenerationRequest(ids, PARAMS, (1, 2)) for ids in ((9, 18, 10), (30,))]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_raylet_start_wait_time_s", "200")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster.address
        ray.shutdown()
        cluster.shutdown()


def vllm_workers() -> set[psutil.Process]:
    return {process for process in psutil.process_iter() if process.name().startswith("VLLM::Worker")}


def test_two_nodes_hold_one_model_take_new_weights_and_are_replaced_together(address: str, tmp_path: Path) -> None:
    others = vllm_workers()
    folder = tiny_model(num_key_value_heads=2)
    model = load_reference(folder)
    config = ClusterConfig(launcher="ray", address=address, security=PLAIN, num_nodes=2, workers_per_node=1)
    cluster = RayVirtualCluster([1, 1], config)
    backend = {"name": "vllm", "pipeline_parallel_size": 2, "kv_cache_gib": KV_CACHE_GIB}
    policy = PolicyConfig.model_validate({"model_name": str(folder), "max_sequence_tokens": 64})
    factory = GenerationFactory(GenerationConfig(backend=backend), policy, None)
    settings = GroupSettings(
        is_spmd=False, workers=1, places_per_worker=2, concurrent_calls=4, log_folder=tmp_path, share=0.5
    )
    group = RayWorkerGroup(cluster, factory, settings=settings)
    try:
        (groups,) = group.call(GenerationBackend.generate, REQUESTS)
        assert max(gaps(model, REQUESTS, groups)) < 1e-4

        changed(model, seed=1)
        sent = transport("object_store").publish(lambda: iter([dict(model.named_parameters())]))
        group.call(GenerationBackend.update_weights, WeightHandle("object_store", 1, sent), 1)
        (groups,) = group.call(GenerationBackend.generate, REQUESTS)
        assert max(gaps(model, REQUESTS, groups)) < 1e-4
        assert groups[0][0].weight_versions == (1,)

        # vLLM's own wait for the answer of a lost node would not end.
        first = group.facts[0].pid
        workers = vllm_workers() - others
        (lost,) = [found for found in workers if first not in [each.pid for each in found.parents()]]
        os.kill(lost.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            group.call(GenerationBackend.generate, REQUESTS)
        group.restart()
        assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
        (groups,) = group.call(GenerationBackend.generate, REQUESTS)
        assert max(gaps(load_reference(folder), REQUESTS, groups)) < 1e-4
    finally:
        group.shutdown()
        cluster.shutdown()


def test_a_run_whose_engine_shares_two_nodes_with_its_trainer(address: str, tmp_path: Path) -> None:
    config = GRPOConfig(
        model=str(tiny_model(num_key_value_heads=2)),
        policy={"optimizer": {"lr": 1e-2}, "max_sequence_tokens": 64},
        num_prompts_per_step=2,
        num_generations_per_prompt=4,
        generation={
            "max_new_tokens": 8,
            "backend": {"name": "vllm", "tensor_parallel_size": 2, "kv_cache_gib": KV_CACHE_GIB},
        },
        validation={"every": 0, "at_end": False},
        max_steps=2,
        cluster={"address": address, "security": PLAIN, "num_nodes": 2, "workers_per_node": 1},
        run_dir=tmp_path / "run",
    )
    assert config.place().transport == "nemorl-rl:object_store"
    rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
    result = config.build().fit(
        dataset=rows, reward_fn=lambda prompt, response: len(response) / 8, console=Console(quiet=True)
    )
    errors = [record["train/token_mult_prob_error"] for record in result.history]
    assert len(errors) == 2
    assert max(errors) < 1.001, errors  # the second step samples from weights that crossed
