"""A run whose engines are on several nodes, one of which is lost and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from elastic_runs import learnt, train
from forked_workers import begun_by
from nemorl_rl.callbacks import Callback
from small_runs import weights

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.slow]
PATIENCE_S = 90.0
STEPS = 8


@pytest.fixture(scope="module")
def nodes(python_of_workers: Path) -> Iterator[Any]:
    """A head with a place for the trainer and for one engine."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with begun_by(python_of_workers):
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"nemorl_training": 1}})
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class LoseNode(Callback):
    """Takes a node away while step 3 samples, brings another one in step 5, and waits for the engine in step 6."""

    def __init__(self, nodes: Any, python: Path) -> None:
        self.nodes, self.python, self.engines = nodes, python, dict[int, int]()
        with begun_by(python):
            self.node = nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
        self.trouble = ""
        self.states: list[dict[str, Any]] = []

    def on_step_begin(self, trainer: Any, step: int) -> None:
        fleet = trainer.generation.workers
        if step == 3:
            threading.Timer(0.05, self.nodes.remove_node, (self.node,), {"allow_graceful": False}).start()
        if step == 5:
            self.trouble = self.awaited(fleet, lambda engine: "devices" in engine["trouble"])["trouble"]
            with begun_by(self.python):
                self.nodes.add_node(num_cpus=1)
        if step == 6:
            self.awaited(fleet, lambda engine: engine["state"] == "ready")
        self.engines[step] = fleet.data_parallel_size
        self.states = fleet.as_json()

    def awaited(self, fleet: Any, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The engine that was lost, once that is so."""
        end = time.monotonic() + PATIENCE_S
        while True:
            for engine in fleet.as_json():
                if engine["lost"] and holds(engine):
                    return dict(engine)
            assert time.monotonic() < end, fleet.as_json()
            time.sleep(0.1)


def test_a_run_that_loses_a_node_goes_on_and_takes_the_engine_back_when_there_are_devices(
    nodes: Any, python_of_workers: Path, tiny_model: Path, tmp_path: Path
) -> None:
    alone = train(tiny_model, tmp_path / "alone", {"gpus_per_node": 0}, max_steps=STEPS)
    loser = LoseNode(nodes, python_of_workers)
    cluster = {
        "address": nodes.address,
        "security": {"plaintext": True},
        "workers_per_node": 3,
        "colocated": False,
        "generation_workers": 2,
        "cpus_per_worker": 1.0,
    }
    result = train(tiny_model, tmp_path / "run", cluster, loser, max_steps=STEPS)
    assert (learnt(result.history), weights(result)) == (learnt(alone.history), weights(alone))
    assert [loser.engines[step] for step in (1, 3, 4, 5, 6, 8)] == [2, 2, 1, 1, 2, 2]
    assert "devices are gone" in loser.trouble
    assert [engine["lost"] for engine in loser.states] in ([0, 1], [1, 0])
    assert all(engine["served"] > 0 for engine in loser.states)
