"""Heterogeneous jobs of Slurm: two parts, one that trains and one of other machines that generates."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from nemorl.errors import ConfigError
from nemorl_ops.launch import sbatch, topology
from nemorl_ops.launch.node import _read
from nemorl_ops.launch.prepare import Prepared, prepare
from recorded_messages import Raises

TWO_KINDS = [
    "launch.nodes=4",
    "launch.gpus_per_node=8",
    "launch.partition=h100",
    "launch.gpu_type=h100",
    "launch.generation={nodes: 1, partition: l40s, gpu_type: l40s, memory_gib_per_node: 256}",
    "generation.backend={name: vllm, tensor_parallel_size: 2}",
    "cluster.colocated=false",
    "cluster.generation_workers=4",
]
"""Three nodes of 8 H100 train; on one of 8 L40S are 4 engines of 2."""


def job(run_yaml: Path, *overrides: str) -> Prepared:
    return prepare(run_yaml, [*TWO_KINDS, *overrides], on="slurm", name="a", root=Path("launches"))


def test_the_parts_are_apart_in_the_script_and_one_step_runs_on_both(run_yaml: Path) -> None:
    found = job(run_yaml, "launch.account=alignment")
    script = found.files["job.sbatch"]
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    between = lines.index("hetjob")
    first, second = lines[:between], lines[between + 1 :]
    assert {"--nodes=3", "--gres=gpu:h100:8", "--partition=h100", "--account=alignment", "--requeue"} <= set(first)
    assert {"--nodes=1", "--gres=gpu:l40s:8", "--partition=l40s", "--account=alignment", "--requeue"} <= set(second)
    assert "--mem=262144M" in second  # 256 * 1024
    # What is of the whole job stands once, in the first part.
    for name in ("--job-name", "--output", "--signal", "--chdir"):
        assert [line.partition("=")[0] for line in lines].count(name) == 1
    # Both steps, that with the look at the folder and that with the run, span both parts.
    assert script.count("srun --het-group=0,1 ") == 2
    assert "--generation-nodes=1" in script
    assert found.plan.words == "not asked: the nodes are of two kinds"
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_job_of_like_nodes_has_one_part(run_yaml: Path) -> None:
    script = prepare(run_yaml, ["launch.nodes=2"], on="slurm", name="a", root=Path("launches")).files["job.sbatch"]
    assert "hetjob" not in script
    assert "--het-group" not in script


@pytest.mark.parametrize(
    ("overrides", "fact", "path"),
    [
        (["cluster.colocated=true"], "cluster.colocated=false cluster.generation_workers=4", "launch.generation"),
        (["cluster.generation_workers=3"], 6, "launch.generation"),
        (["launch.generation={nodes: 4}"], 4, "launch.generation.nodes"),
        (["launch.generation={nodes: 1, partition: 'a b'}"], "a b", "launch.generation.partition"),
        (["launch.generation={nodes: 1, partitoin: a}"], "partition", "launch.generation.partitoin"),
        (["launch.seeds=[1, 2]"], "arrays", "launch.seeds"),
    ],
)
def test_what_cannot_be_is_told_with_what_to_set(
    run_yaml: Path, raises: Raises, overrides: list[str], fact: object, path: str
) -> None:
    with raises(ConfigError, fact, path=path):
        job(run_yaml, *overrides)


def test_the_last_nodes_are_for_generation(tmp_path: Path) -> None:
    words = [f"--attempt={tmp_path}", "--nodes=4", "--name=n", "--generation-nodes=1"]
    roles = [_read([*words, f"--rank={rank}", "--", "true"]).role for rank in range(4)]
    assert roles == ["training", "training", "training", "generation"]
    assert _read([*words[:3], "--rank=3", "--", "true"]).role is None
    assert topology.resources(3, 8, {}, "", None, "generation") == {"nemorl_generation": 1.0}


@pytest.mark.parametrize(
    ("time", "seconds"),
    # The forms of sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, ….
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-12", 216_000), ("2-12:30", 217_800), ("2-0:0:15", None)],
)
def test_times_are_read_as_sbatch_reads_them(time: str, seconds: int | None) -> None:
    assert sbatch.seconds_of(time) == seconds
