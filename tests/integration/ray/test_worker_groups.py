"""Worker groups on a real Ray: order, data, and who is named when something goes wrong."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from nemorl.base.process.logs import RunHandler, installed, log_ids
from nemorl.errors import BackendError, DeadlineError, ForeignError, ResourceError, WorkerHungError, WorkerLostError
from nemorl.resources.ray_answers import BLAME_S, FAILURE_S, Answers
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_launcher import split_devices
from nemorl.resources.ray_ranks import GroupSettings, Rank
from nemorl.resources.ray_session import RaySession
from nemorl.resources.ray_workers import RayWorkerGroup
from nemorl.resources.worker import AttachedGroup
from recorded_messages import Raises
from workers import CPU, Adder, Doubler, SlowStarter

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_calls_reach_all_ranks_and_results_come_in_rank_order(group: RayWorkerGroup) -> None:
    assert group.call(Adder.add, 10) == [10, 11]
    assert group.scatter(Adder.add, [1, 5]) == [1, 6]
    first, second = group.call(Adder.place)
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
    assert first.master_port == second.master_port > 0


def test_workers_log_as_the_run_does_with_its_ids_and_their_own(group: RayWorkerGroup, tmp_path: Path) -> None:
    group.call(Adder.note, "nobody logs")
    with installed(RunHandler(io.StringIO(), logging.INFO, "json", {"run": "r1", "step": 3})), log_ids(episode=7):
        group.call(Adder.note, "one")
        group.call(Adder.note, "two")
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(texts) == 2
    for text in texts.values():
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert [line["message"] for line in found] == ["one", "two"]
        assert {(line["run"], line["step"], line["episode"], line["worker"]) for line in found} == {
            ("r1", 3, 7, "adders")
        }
    ranks = sorted(json.loads(text.splitlines()[-1])["rank"] for text in texts.values())
    assert ranks == [0, 1]


def test_ranks_that_share_a_shard_answer_once(cluster: RayVirtualCluster) -> None:
    group = RayWorkerGroup(cluster, Adder, settings=GroupSettings(shards=(0, 0)))
    assert group.data_parallel_size == 1
    assert group.scatter(Adder.add, [7]) == [7]
    group.shutdown()


def test_attached_objects_live_and_die_with_their_hosts(group: RayWorkerGroup) -> None:
    group.attach_engine(Doubler)
    attached = AttachedGroup(group)
    assert attached.data_parallel_size == 2
    assert attached.call(Doubler.double, 3) == [6, 8]  # twice what its host adds to 3
    assert attached.scatter(Doubler.double, [1, 5]) == [2, 12]
    with pytest.raises(WorkerLostError):
        group.call(Adder.fail, 1, "dies")
    group.restart()
    assert attached.call(Doubler.double, 3) == [6, 8]


def test_an_error_in_a_loss_names_the_loss_and_its_worker_lives_on(group: RayWorkerGroup, raises: Raises) -> None:
    with raises(ForeignError, "Faulty", "SystemExit", 0):
        group.call(Adder.fail, 1, "loses")
    assert group.call(Adder.add, 1) == [1, 2]


def test_ranks_of_one_shard_need_not_be_neighbours() -> None:
    # Pipeline stages of two copies, as megatron-core numbers them: ranks 0 and 2 hold one copy, 1 and 3 the other.
    group = object.__new__(RayWorkerGroup)
    group.settings, group._size = GroupSettings(shards=(0, 1, 0, 1)), 4
    assert group._shards == [[0, 2], [1, 3]]
    assert group.data_parallel_size == 2


def test_one_rank_of_a_copy_sends_its_answer_and_all_of_them_work(group: RayWorkerGroup) -> None:
    copies = object.__new__(RayWorkerGroup)
    copies.__dict__ |= group.__dict__ | {"settings": GroupSettings(shards=(0, 0)), "_shards": [[0, 1]]}
    answers: list[dict[int, object]] = []

    class Noted(Answers):
        def gather(self, what: str, calls: Mapping[Rank, Any]) -> dict[int, Any]:
            answers.append(super().gather(what, calls))
            return answers[-1]

    copies._answers = Noted(group._answers.timeout_s, None)
    assert copies.scatter(Adder.add, [7]) == [7]
    assert answers == [{0: 7, 1: None}]
    with pytest.raises(ForeignError):
        copies.scatter(Adder.fail, [1], "loses")  # by rank 1, whose answer nobody reads


def test_a_rank_that_failed_ends_the_wait_for_those_that_sleep(group: RayWorkerGroup) -> None:
    began_s = time.monotonic()
    with pytest.raises(ForeignError):
        group.scatter(Adder.nap, [12.0, -1.0])  # nobody sleeps for less than no time
    assert time.monotonic() - began_s < FAILURE_S + BLAME_S + 3


def test_a_worker_that_dies_is_named_with_its_last_words_and_replaced(group: RayWorkerGroup, raises: Raises) -> None:
    group.call(Adder.add, 10)
    pid = group.facts[1].pid
    with raises(WorkerLostError, "adders", 1, pid, 10):
        group.call(Adder.fail, 1, "dies")
    group.restart()
    assert group.call(Adder.add, 5) == [5, 6]


def test_a_worker_that_does_not_answer_is_named(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    group = RayWorkerGroup(cluster, Adder, settings=GroupSettings(name="adders"))
    monkeypatch.setattr(group._answers, "timeout_s", 8.0)  # not before: starting two processes may take longer
    with raises(WorkerHungError, 8, "adders", 1):
        group.call(Adder.fail, 1, "sleeps")
    group.kill()


def test_a_workers_own_error_arrives_as_it_is(group: RayWorkerGroup, raises: Raises) -> None:
    with raises(BackendError):
        group.call(Adder.fail, 0, "refuses")


def test_a_foreign_error_names_the_rank(group: RayWorkerGroup, raises: Raises) -> None:
    with raises(ForeignError, "adders", 1, "ZeroDivisionError"):
        group.call(Adder.fail, 1, "breaks")


def test_only_the_lost_replica_is_replaced(cluster: RayVirtualCluster) -> None:
    group = RayWorkerGroup(cluster, Adder, settings=GroupSettings(is_spmd=False))
    kept, lost = group.call(Adder.process)
    os.kill(lost, signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        group.call(Adder.process)
    group.restart()
    again, new = group.call(Adder.process)
    assert (again, new != lost) == (kept, True)
    group.shutdown()


def test_no_call_enters_a_group_that_is_being_revived(cluster: RayVirtualCluster) -> None:
    group = RayWorkerGroup(cluster, SlowStarter, settings=GroupSettings(is_spmd=False))
    os.kill(group.facts[1].pid, signal.SIGKILL)
    revival = threading.Thread(target=group.restart)
    revival.start()
    answers: list[object] = []
    while revival.is_alive():
        try:
            answers.append(group.call(Adder.add, 10))
        except WorkerLostError:  # the one of before: whoever called waits for the new one and calls again
            answers.append(None)
    revival.join()
    # Contexts of replicas are all of rank 0.
    assert group.call(Adder.add, 10) == [10, 10]
    assert None in answers
    assert all(answer in (None, [10, 10]) for answer in answers)
    assert not any(rank.is_lost for rank in group._ranks), "the loss of the old one was put down to the new one"
    group.shutdown()


def nap(group: RayWorkerGroup) -> None:
    with suppress(WorkerLostError):
        group.scatter(Adder.nap, [3.0, 0.0])


def test_a_busy_replica_is_not_taken_for_a_lost_one(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemorl.resources.ray_workers.BLAME_S", 0.2)
    group = RayWorkerGroup(cluster, Adder, settings=GroupSettings(is_spmd=False))
    busy, lost = group.call(Adder.process)
    sleeper = threading.Thread(target=nap, args=(group,))
    sleeper.start()
    os.kill(lost, signal.SIGKILL)
    with pytest.raises(WorkerLostError):  # when Ray knows, which takes it a moment
        group.call(Adder.process)
    group.restart()
    assert group.call(Adder.process)[0] == busy
    sleeper.join()
    group.shutdown()


def test_variables_and_ray_s_runtime_environment_reach_the_workers(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"env_vars": {"NCCL_SOCKET_IFNAME": "lo"}, "runtime_env": {"config": {"setup_timeout_seconds": 60}}}
    monkeypatch.setattr(cluster, "config", CPU.model_copy(update=changes))
    group = RayWorkerGroup(cluster, SlowStarter)
    assert group.call(SlowStarter.variable, "NCCL_SOCKET_IFNAME") == ["lo", "lo"]
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    group.shutdown()


def test_the_death_of_what_a_worker_itself_started_is_a_loss(group: RayWorkerGroup, raises: Raises) -> None:
    with raises(WorkerLostError, "adders"):
        group.call(Adder.ask_a_dead_helper)


def test_a_worker_that_cannot_start_says_why(cluster: RayVirtualCluster, raises: Raises) -> None:
    with raises(WorkerLostError, "adders", "/proc/nowhere"):
        RayWorkerGroup(cluster, Adder, settings=GroupSettings(name="adders", log_folder=Path("/proc/nowhere")))


def test_references_may_be_arguments(group: RayWorkerGroup) -> None:
    assert group.call(Adder.add, ray.put(10)) == [10, 11]
    assert group.scatter(Adder.add, [ray.put(1), ray.put(5)]) == [1, 6]


@pytest.mark.parametrize("refused", [{"working_dir": "."}, {"pip": 5}, {"working_dir": "/nowhere"}], ids=str)
def test_a_runtime_environment_that_ray_refuses_is_an_error_of_the_config(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch, refused: dict[str, object], raises: Raises
) -> None:
    monkeypatch.setattr(cluster, "config", CPU.model_copy(update={"runtime_env": refused}))
    with raises(ResourceError, "adders", "cluster.runtime_env"):
        RayWorkerGroup(cluster, Adder, settings=GroupSettings(name="adders"))


def test_threads_of_nested_loops_are_passed_on(cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")  # OpenMP's: by depth
    group = RayWorkerGroup(cluster, SlowStarter)
    assert group.call(SlowStarter.variable, "OMP_NUM_THREADS") == ["2,1", "2,1"]
    group.shutdown()


def test_more_than_the_cluster_has_is_refused_at_once(cluster: RayVirtualCluster, raises: Raises) -> None:
    with raises(ResourceError, 1, 64, "0.5", varies="the cluster has .*"):
        RayVirtualCluster([64], CPU)
    with raises(ResourceError, 3, 1, "0.5", varies="the cluster has .*"):
        RayVirtualCluster([1, 1, 1], CPU)


def test_waiting_for_devices_that_others_hold_has_a_deadline(cluster: RayVirtualCluster, raises: Raises) -> None:
    room = int(ray.available_resources()["CPU"] / 0.5)
    with raises(DeadlineError, 2, room + 1, "0.5", varies=r"\d+(?= places| CPU$)"):
        RayVirtualCluster([room + 1], CPU)


def test_an_interpreter_is_asked_before_anything_starts(
    cluster: RayVirtualCluster, tmp_path: Path, raises: Raises
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    settings = GroupSettings(python=tmp_path / "bare" / "bin" / "python")
    with raises(BackendError, f"ray=={ray.__version__}"):
        RayWorkerGroup(cluster, Adder, settings=settings)
    with raises(BackendError, "no_such_module"):
        RayWorkerGroup(cluster, Adder, settings=GroupSettings(python=Path(sys.executable), modules=("no_such_module",)))


def test_workers_run_under_another_interpreter(cluster: RayVirtualCluster, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    # An environment of its own that sees our packages, editable ones included.
    (site / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    python = tmp_path / "other" / "bin" / "python"
    ours = RayWorkerGroup(cluster, Adder, settings=GroupSettings(share=0.5))
    theirs = RayWorkerGroup(cluster, Adder, settings=GroupSettings(share=0.5, python=python, modules=("torch",)))
    assert set(ours.call(Adder.interpreter)) == {sys.executable}
    assert set(theirs.call(Adder.interpreter)) == {str(python)}
    assert theirs.call(Adder.add, 1) == [1, 2]
    ours.shutdown()
    theirs.shutdown()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "{own}"])
def test_a_session_joins_ray_where_it_runs_and_leaves_it_running(
    cluster: RayVirtualCluster, host: str, raises: Raises
) -> None:
    own, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    RaySession(CPU).close()
    RaySession(CPU.model_copy(update={"address": f"{host.format(own=own)}:{port}"})).close()
    assert ray.is_initialized()
    with raises(ResourceError):
        RaySession(CPU.model_copy(update={"address": f"{own}:{int(port) + 1}"}))


@pytest.mark.parametrize(
    ("nodes", "per_node", "apart", "training", "generation"),
    [(1, 2, 1, [1], [1]), (2, 8, 4, [8, 4], [0, 4]), (2, 8, 10, [6, 0], [2, 8]), (1, 4, 0, [4], [0])],
)
def test_generation_apart_takes_devices_from_the_last_nodes(
    nodes: int, per_node: int, apart: int, training: list[int], generation: list[int]
) -> None:
    assert split_devices(nodes, per_node, apart) == (training, generation)
