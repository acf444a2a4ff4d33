"""Nodes that the cluster takes back (of one machine): what is on them is saved and moved before they go.

``ray drain-node`` is Ray's own command. No worker may be lost on the way: the runs may restart none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import small_runs
from forked_workers import begun_by
from nemorl.base.files.jsonl import read_jsonl
from nemorl.resources.ray_drain import draining_nodes
from nemorl.run import TrainResult
from nemorl_rl.callbacks import Callback
from nemorl_rl.placement.fleet import EngineFleet
from ray.cluster_utils import Cluster
from small_runs import ALONE, length, losses, node_of, weights

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def cluster(python_of_workers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that nothing runs on, and three nodes of one core."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("nemorl.resources.ray_drain.LOOK_S", 0.0)
    with begun_by(python_of_workers):
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(3):
            nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


train = partial(small_runs.train, reward=length)


def outcome(result: TrainResult) -> tuple[list[float], dict[str, bytes]]:
    return losses(result), weights(result)


class DrainAt(Callback):
    """The node of a role's first worker is drained as a step begins."""

    def __init__(self, role: str, step: int) -> None:
        self.role, self.step, self.node = role, step, ""
        self.nodes_at_end: dict[str, str] = {}

    def on_step_begin(self, trainer: Any, step: int) -> None:
        if step == self.step and not self.node:
            self.node = self.nodes(trainer)[self.role]
            drain(self.node)

    def on_fit_end(self, trainer: Any, metrics: Any) -> None:
        self.nodes_at_end = self.nodes(trainer)

    @staticmethod
    def nodes(trainer: Any) -> dict[str, str]:
        groups = {"trainer": trainer.run.policy.workers, "generator": trainer.generation.workers}
        return {role: node_of_group(group) for role, group in groups.items()}


def node_of_group(group: Any) -> str:
    """The node of a group's first worker, or of a fleet's first engine."""
    if isinstance(group, EngineFleet):
        group = group._in("ready")[0].group
    return node_of(group._ranks[0].places[0])


def drain(node: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    command += ["--address", ray.get_runtime_context().gcs_address]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "taken back"]
    subprocess.run(
        [*command, *why, "--node-id", node, "--deadline-remaining-seconds", "120"], check=True, capture_output=True
    )
    end_s = time.monotonic() + 30
    while node not in (draining_nodes() or {}) and time.monotonic() < end_s:  # until the node has told the cluster
        time.sleep(0.05)


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run_dir / "events.jsonl") if event["event"] in kinds]


APART = {"num_nodes": 2, "workers_per_node": 1, "colocated": False}
ONE = {"num_nodes": 1, "workers_per_node": 1}


@pytest.mark.parametrize(
    ("role", "layout", "moves_training"),
    [
        ("trainer", APART, True),
        ("trainer", ONE, True),
        ("trainer", {**ONE, "take_turns": True}, True),
    ],
    ids=["trainer", "both", "both, which take turns"],
)
def test_workers_leave_a_node_that_drains_between_two_steps_and_nothing_changes(
    role: str, layout: dict[str, Any], moves_training: bool, cluster: Any, tiny_model: Path, tmp_path: Path
) -> None:
    shared = {"address": cluster.address, "security": {"plaintext": True}, "max_restarts": 0}
    alone = train(tiny_model, tmp_path / "alone", ALONE)
    drained = DrainAt(role, 2)
    moved = train(tiny_model, tmp_path / "moved", {**shared, **layout}, drained)
    assert outcome(moved) == outcome(alone)
    assert len(drained.nodes_at_end) == 2
    assert drained.node not in drained.nodes_at_end.values()
    told = events(tmp_path / "moved", "draining", "moved")
    assert [event["event"] for event in told] == ["draining", "moved"]
    assert told[1]["training"] is moves_training
    assert all(drained.node[:8] in event["nodes"][0] for event in told)
    assert told[0]["step"] == 2
    assert told[1]["step"] in (2, 3)  # when Ray has reserved the other places
    assert not events(tmp_path / "moved", "recovered")


def test_a_worker_that_dies_on_a_node_that_drains_begins_anew_elsewhere(
    cluster: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dies(DrainAt):
        """It is killed as soon as its node drains, where Ray would start no other."""

        def on_step_begin(self, trainer: Any, step: int) -> None:
            if step == self.step and not self.node:
                super().on_step_begin(trainer, step)
                os.kill(trainer.run.policy.workers.facts[0].pid, signal.SIGKILL)

    monkeypatch.setattr("nemorl.resources.ray_drain.LOOK_S", 3600.0)
    shared = {"address": cluster.address, "security": {"plaintext": True}, "max_restarts": 1}
    alone = train(tiny_model, tmp_path / "alone", ALONE)
    drained = Dies("trainer", 2)
    assert outcome(train(tiny_model, tmp_path / "run", {**shared, **APART}, drained)) == outcome(alone)
    assert drained.node not in drained.nodes_at_end.values()
    assert len(events(tmp_path / "run", "recovered")) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_engine_with_devices_of_its_own_leaves_by_itself(
    mode: str, cluster: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moves(DrainAt):
        """A step later the next one has come."""

        def on_step_begin(self, trainer: Any, step: int) -> None:
            super().on_step_begin(trainer, step)
            end_s = time.monotonic() + 300
            while step == self.step + 1 and trainer.generation.workers.ranks != [1] and time.monotonic() < end_s:
                time.sleep(0.1)

    monkeypatch.setattr("nemorl_rl.placement.fleet.LOOK_S", 0.0)
    shared = {"address": cluster.address, "security": {"plaintext": True}, "max_restarts": 0}
    drained = Moves("generator", 2)
    moved = train(tiny_model, tmp_path / "moved", {**shared, **APART}, drained, rollouts={"mode": mode})
    assert [record["step"] for record in moved.history if "train/loss" in record] == [1, 2, 3, 4]
    assert drained.node not in drained.nodes_at_end.values()
    assert not events(tmp_path / "moved", "recovered", "moved")
    if mode == "sync":
        assert outcome(moved) == outcome(train(tiny_model, tmp_path / "alone", ALONE))


def test_without_room_elsewhere_the_step_is_saved_and_the_run_moves_when_a_node_joins(
    cluster: Any, tiny_model: Path, tmp_path: Path
) -> None:
    class Joins(Callback):
        """A node joins as step 3 begins."""

        def on_step_begin(self, trainer: Any, step: int) -> None:
            if step == 3:
                assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [2]
                cluster.add_node(num_cpus=1)
                cluster.wait_for_nodes()
                end_s = time.monotonic() + 60
                while not trainer.run.resources.launcher.drains.is_room_elsewhere and time.monotonic() < end_s:
                    time.sleep(0.2)

    cluster.remove_node(list(cluster.worker_nodes)[-1])
    shared = {"address": cluster.address, "security": {"plaintext": True}, "max_restarts": 0}
    drained = DrainAt("trainer", 2)
    train(tiny_model, tmp_path / "run", {**shared, **APART}, drained, Joins())
    told = events(tmp_path / "run", "draining", "moved")
    assert [(event["event"], event["step"]) for event in told] == [("draining", 2), ("moved", 3)]
    assert len(drained.nodes_at_end) == 2
    assert drained.node not in drained.nodes_at_end.values()
