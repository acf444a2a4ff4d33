"""Ranks that do not come to a collective, on a real Ray and gloo: noticed, named, replaced."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config import ClusterConfig
from nemorl.errors import CollectiveError, DeviceLostError, WorkerHungError, WorkerLostError
from nemorl.resources.ray_answers import BLAME_S
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_ranks import GroupSettings
from nemorl.resources.ray_workers import RayWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl_cli.console import Console
from nemorl_preference.dpo import DPOConfig
from nemorl_rl.callbacks import Callback
from recorded_messages import Raises
from workers import Collective

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]
HANG_S = 6.0
PATIENT_S = 120.0
"""Of collectives where the heartbeat is to be first."""


@contextmanager
def group(hang_timeout_s: float | None, collective_timeout_s: float, log_folder: Path) -> Iterator[RayWorkerGroup]:
    config = ClusterConfig(
        launcher="ray",
        workers_per_node=2,
        cpus_per_worker=0.5,
        placement_timeout_s=30,
        worker_timeout_s=100,
        hang_timeout_s=hang_timeout_s,
    )
    cluster = RayVirtualCluster([2], config)
    context = WorkerContext(collective_timeout_s=collective_timeout_s)
    made = RayWorkerGroup(cluster, Collective, context, GroupSettings(name="trainers", log_folder=log_folder))
    try:
        assert made.call(Collective.meet) == [2.0, 2.0]
        yield made
    finally:
        made.kill()
        cluster.shutdown()


def test_a_stopped_rank_is_named_and_its_group_begins_anew(tmp_path: Path, raises: Raises) -> None:
    with group(HANG_S, PATIENT_S, tmp_path) as trainers:
        pid, began_s = trainers.facts[1].pid, time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        with raises(WorkerHungError, "trainers", pid, "all_reduce") as caught:
            trainers.call(Collective.meet)
        took_s = time.monotonic() - began_s
        assert HANG_S <= took_s < 1.5 * HANG_S + 3, took_s
        assert str(trainers.facts[0].pid) not in str(caught.value), "rank 0 waits, and is not to blame"
        trainers.restart()
        assert trainers.call(Collective.meet) == [2.0, 2.0]
        assert trainers.facts[1].pid != pid


@pytest.mark.full
def test_a_rank_that_sleeps_before_the_collective_is_named_with_its_line(tmp_path: Path, raises: Raises) -> None:
    with group(HANG_S, PATIENT_S, tmp_path) as trainers:
        pid = trainers.facts[0].pid
        with raises(WorkerHungError, pid, "be_late", "all_reduce"):
            trainers.call(Collective.meet, 0, 60.0)


def test_a_rank_at_work_is_waited_for(tmp_path: Path) -> None:
    with group(2.0, PATIENT_S, tmp_path) as trainers:
        assert trainers.call(Collective.meet, 1, 9.0, busy=True) == [2.0, 2.0]


def test_a_short_sleep_is_waited_for(tmp_path: Path) -> None:
    with group(HANG_S, PATIENT_S, tmp_path) as trainers:
        assert trainers.call(Collective.meet, 1, 4.0) == [2.0, 2.0]


def test_a_collective_that_times_out_is_a_lost_group_and_names_it(tmp_path: Path, raises: Raises) -> None:
    with group(None, 3.0, tmp_path) as trainers:
        began_s = time.monotonic()
        with raises(CollectiveError, "all_reduce", "3000ms", "trainers", trainers.facts[0].pid):
            trainers.call(Collective.meet, 1, 15.0)
        assert time.monotonic() - began_s < 3 + BLAME_S + 3
        trainers.restart()
        assert trainers.call(Collective.meet) == [2.0, 2.0]


def test_a_rank_that_is_killed_in_a_collective_is_named_and_not_who_waited_for_it(
    tmp_path: Path, raises: Raises
) -> None:
    with group(HANG_S, PATIENT_S, tmp_path) as trainers:
        pid = trainers.facts[1].pid
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        with raises(WorkerLostError, pid) as caught:
            trainers.call(Collective.meet, 1, 30.0)
        assert not isinstance(caught.value, CollectiveError)


def test_a_device_that_fails_is_a_lost_worker_and_no_error_of_the_code(tmp_path: Path, raises: Raises) -> None:
    with group(HANG_S, PATIENT_S, tmp_path) as trainers, raises(DeviceLostError, "trainers", 1, "ECC"):
        trainers.call(Collective.fail_on_its_device, 1)


class Strike(Callback):
    """A signal to the second rank of the trainer, as step 3 begins."""

    def __init__(self, number: signal.Signals) -> None:
        self.number: signal.Signals | None = number

    def on_step_begin(self, trainer: Any, step: int) -> None:
        if step == 3 and self.number is not None:
            os.kill(trainer.run.policy.workers.facts[1].pid, self.number)
            self.number = None


def trained(model: Path, run_dir: Path, *callbacks: Callback) -> list[dict[str, float]]:
    """Records of a run of two ranks that learns from pairs."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 7)} for a in range(4) for b in range(4)
    ]
    config = DPOConfig(
        model=str(model),
        policy={"init": "random", "optimizer": {"lr": 1e-3}},
        batch_size=4,
        max_steps=4,
        checkpoint={"every": 1},
        validation={"every": 0, "at_end": False},
        cluster={"launcher": "ray", "workers_per_node": 2, "cpus_per_worker": 0.5, "hang_timeout_s": HANG_S},
        run_dir=run_dir,
    )
    result = config.build().fit(dataset=rows, callbacks=callbacks, console=Console(quiet=True))
    return [{name: record[name] for name in ("step", "train/loss", "train/grad_norm")} for record in result.history]


@pytest.mark.full
def test_a_run_of_which_one_rank_stops_goes_on_as_if_nothing_had_been(tiny_model: Path, tmp_path: Path) -> None:
    undisturbed = trained(tiny_model, tmp_path / "quiet")
    assert trained(tiny_model, tmp_path / "struck", Strike(signal.SIGSTOP)) == undisturbed
    weights = [tmp_path / name / "model/model.safetensors" for name in ("quiet", "struck")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    events = [event for event in read_jsonl(tmp_path / "struck" / "events.jsonl") if event["event"] == "recovered"]
    assert [event["step"] for event in events] == [2]
    assert re.search(r"rank 1 \(", events[0]["error"].splitlines()[0])
