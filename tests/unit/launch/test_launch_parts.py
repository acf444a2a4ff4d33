"""The parts that nodes are made of: folders where they meet, ports, topology, processes that outlive their parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from nemorl.base.files import process_guard
from nemorl_ops.launch import detached, ray_part, topology
from nemorl_ops.launch.attempts import Attempt, Outcome
from nemorl_ops.launch.ports import FIRST, LAST, SIZE, PortBlock
from nemorl_ops.launch.prepare import prepare


def test_attempts_count_from_the_newest(tmp_path: Path) -> None:
    assert Attempt.latest(tmp_path) is None
    for number in (0, 9, 10):
        (tmp_path / f"attempt-{number}").mkdir()
    newest = Attempt.latest(tmp_path)
    assert newest is not None
    assert newest.number == 10


def test_an_attempt_says_how_it_ended_and_why(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    assert attempt.outcome is None
    attempt.conclude(Outcome("continue", "node n1\nis lost"))
    assert attempt.outcome == Outcome("continue", "node n1 is lost")
    assert (tmp_path / "outcome").read_text() == "continue node n1 is lost\n"
    assert attempt.stop_reason is None
    attempt.request_stop("cancelled")
    assert attempt.stop_reason == "cancelled"


def test_blocks_of_ports_are_disjoint_and_below_the_ephemeral_range() -> None:
    blocks = [PortBlock.claimed() for _ in range(3)]
    try:
        firsts = [block.first for block in blocks]
        assert len(set(firsts)) == 3
        ports = [int(option.rpartition("=")[2]) for block in blocks for option in block.options(head=True)]
        assert len(set(ports)) == len(ports) == 3 * 10
        assert all(FIRST <= port < LAST for port in ports)
        # Two options of the head alone: its own port and that of remote drivers.
        assert [len(blocks[0].options(head=head)) for head in (True, False)] == [10, 8]
        assert blocks[0].options(head=False)[-1] == f"--max-worker-port={firsts[0] + SIZE - 1}"
    finally:
        for block in blocks:
            block.release()


def test_a_released_block_is_free_again() -> None:
    block = PortBlock.claimed()
    block.release()
    again = PortBlock.claimed()
    again.release()
    assert again.first == block.first


def test_topology_becomes_resources() -> None:
    smi = "    Fabric\n        ClusterUUID : 4b01-7\n        CliqueId : 32766\n" * 4
    slurm = {"SLURM_TOPOLOGY_ADDR": "spine0.leaf3.node17", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    # The sixth node, in segments of four: segment 1. Four GPUs share the NVLink domain.
    assert topology.resources(5, 4, slurm, smi, 4) == {
        "nvlink_domain_4b01-7-32766": 4.0,
        "switch_spine0": 1.0,
        "switch_leaf3": 1.0,
        "segment_1": 1.0,
    }


def test_a_gpu_outside_any_domain_gives_none() -> None:
    smi = "ClusterUUID : 00000000-0000-0000-0000-000000000000\nCliqueId : 0\n"
    assert topology.resources(0, 8, {}, smi, None) == {}
    assert topology.resources(0, 8, {}, "ClusterUUID : N/A\nCliqueId : N/A\n", None) == {}
    assert topology.resources(0, 0, {}, "", None) == {}


def test_what_a_killed_node_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_part, "PLACE", tmp_path)
    mine, dead, unknown = (tmp_path / f"nrl-{name}" for name in ("mine", "dead", "unknown"))
    elsewhere = tmp_path / "nrl-elsewhere"
    namespace = os.readlink("/proc/self/ns/pid")
    own = {"pid": os.getpid(), "identity": detached.identity(os.getpid()), "namespace": namespace}
    for folder in (mine, dead, unknown, elsewhere):
        folder.mkdir()
    (elsewhere / "owner.json").write_text(json.dumps({**own, "identity": "x:1", "namespace": "another"}))
    (mine / "owner.json").write_text(json.dumps(own))
    (dead / "owner.json").write_text(json.dumps({**own, "identity": "another boot:1"}))
    orphans = [
        subprocess.Popen(["sleep", "99"], env={process_guard.MARK: str(folder), "PATH": os.environ["PATH"]})
        for folder in (mine, dead)
    ]
    reaper = threading.Thread(target=orphans[1].wait)  # else its process stays on as a zombie, with its environment
    reaper.start()
    ray_part.remove_left_over()
    reaper.join(60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nrl-elsewhere", "nrl-mine", "nrl-unknown"]
    assert orphans[1].returncode == -signal.SIGKILL
    assert orphans[0].poll() is None
    orphans[0].kill()
    orphans[0].wait()


def test_a_detached_process_is_known_again_and_ended_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import os, subprocess; print(os.environ['PLANT'], os.getcwd(), flush=True); subprocess.run(['sleep', '99'])"
    )
    handle = detached.start([sys.executable, "-c", program], log, tmp_path, {"PLANT": "x"})
    deadline = time.monotonic() + 60
    while log.read_text() != f"x {tmp_path}\n" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.read_text() == f"x {tmp_path}\n"
    assert detached.is_alive(handle)
    # The number alone means nothing: another process may have it by now.
    assert not detached.is_alive({**handle, "identity": "another boot:1"})
    detached.kill(handle)
    os.waitpid(handle["pid"], 0)
    assert not detached.is_alive(handle)


def test_a_machine_that_does_not_see_the_folder_starts_nothing(tmp_path: Path) -> None:
    request = {"verb": "start", "command": ["true"], "log": f"{tmp_path}/attempt-0/node-1.log", "directory": "/"}
    words = [sys.executable, "-m", "nemorl_ops.launch.detached"]
    done = subprocess.run(words, input=json.dumps(request), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (detached.NOT_SHARED, f"there is no {tmp_path}/attempt-0\n")
    assert list(tmp_path.iterdir()) == []


def test_slurm_is_asked_for_the_cores_of_what_runs_there_and_reads_no_pattern_in_a_folder(run_yaml: Path) -> None:
    def lines(*options: str) -> list[str]:
        script = prepare(run_yaml, list(options), on="slurm", name="a", root=Path("at%j")).files["job.sbatch"]
        return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]

    shared = lines("launch.gpus_per_node=8", "cluster.cpus_per_worker=2")
    # 8 workers of 2, a scheduler for each of 8 engines, 8 graders, 2 for Ray and the driver.
    assert "cpus-per-task=34" in shared
    assert f"output={Path.cwd()}/at%%j/a/slurm-%j.log" in shared
    assert not any(line.startswith("mem=") for line in shared)
    alone = lines("launch.gpus_per_node=8", "launch.exclusive=true")
    assert "mem=0" in alone, "all of the node's memory is not an exclusive job's before it asks"
    assert not any(line.startswith("cpus-per-task") for line in alone)
