"""`nemorl launch --on slurm` with a real Slurm of three nodes: a run over two of them, and all that can befall it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import chdir, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import END_S, LONG, START_S, Launches, command_lines, write_run
from nemorl.errors import ResourceError
from nemorl_ops.launch import records
from nemorl_ops.launch.base import Launch
from nemorl_ops.launch.prepare import Prepared, prepare
from slurm_cluster import await_true, missing, slurm

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.slow]

PLANTED = "hf_planted-value-0123456789"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm")) as conf, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        patch.setenv("HF_TOKEN", PLANTED)
        yield conf


class Site(Launches):
    """A login node: the command ``nemorl launch`` in a folder, and Slurm's own commands."""

    def __init__(self, folder: Path, conf: Path, model: Path) -> None:
        super().__init__(folder, {"SLURM_CONF": str(conf), "HF_TOKEN": PLANTED})
        quick = {"RAY_health_check_period_ms": "1000"}
        write_run(folder, model, name="slurm", cpus_per_node=1, object_store_gib=0.1, environment=quick)

    def submit(self, name: str, *overrides: str) -> Any:
        return self.launch("run.json", *overrides, f"run_dir=runs/{name}", "--name", name)

    def slurm(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def prepared(self, name: str, *overrides: str) -> Prepared:
        """What would be submitted, prepared in this process."""
        with chdir(self.folder):
            return prepare(Path("run.json"), list(overrides), on=None, name=name, root=Path("launches"))

    def outcome(self, name: str, number: int) -> str:
        return (self.attempt(name, number) / "outcome").read_text().strip()

    def hurry(self, job_id: str) -> None:
        """Slurm starts a requeued job again after two minutes, unless told otherwise."""

        def is_running_again() -> bool:
            shown = self.slurm("scontrol", "show", "job", job_id)
            if "JobState=PENDING" in shown:
                self.slurm("scontrol", "update", f"job={job_id}", "StartTime=now")
            return "JobState=RUNNING" in shown and "Restarts=0" not in shown

        await_true(is_running_again, END_S, lambda: self.slurm("scontrol", "show", "job", job_id))

    def explain(self, name: str) -> str:
        return self.slurm("squeue") + super().explain(name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, cluster: Path, model: Path) -> Site:
    return Site(tmp_path_factory.mktemp("site"), cluster, model)


def test_a_run_finishes_and_no_secret_is_written_down(site: Site) -> None:
    submitted = site.submit("one", "launch.nodes=1", "max_steps=2")
    assert PLANTED not in command_lines()
    site.await_state("one", "finished", START_S)
    assert site.steps("one") == [1, 2]
    assert PLANTED not in json.dumps(submitted)
    assert site.holders(PLANTED) == []


@pytest.mark.full
def test_a_run_over_two_nodes_finishes_and_no_secret_is_written_down(site: Site) -> None:
    site.submit("two", "launch.nodes=2", "max_steps=3")
    site.await_state("two", "finished", START_S)
    assert site.launch("status", "two")["state"] == "finished"
    assert site.steps("two") == [1, 2, 3]
    names = {json.loads((site.attempt("two", 0) / f"node-{rank}.json").read_text())["name"] for rank in (0, 1)}
    assert len(names) == 2
    assert site.holders(PLANTED) == []


@pytest.mark.full
def test_two_jobs_at_once_share_a_machine_and_no_port(site: Site) -> None:
    for name, seed in (("left", 1), ("right", 2)):
        site.submit(name, "max_steps=3", f"seed={seed}", "launch.nodes=1")
    for name in ("left", "right"):
        site.await_state(name, "finished", START_S)
        assert site.steps(name) == [1, 2, 3]


@pytest.mark.full
def test_a_lost_node_is_named_and_the_run_continues(site: Site) -> None:
    job_id = site.submit("lost", "launch.nodes=2", f"max_steps={LONG}")["handle"]["job_id"]
    site.await_step("lost", 6)
    _kill_node(site, "lost", 1)
    await_true((site.attempt("lost", 0) / "outcome").is_file, END_S, lambda: site.explain("lost"))
    assert site.outcome("lost", 0).startswith("continue node n1 is lost")
    site.hurry(job_id)
    _assert_continues(site, "lost", 1)
    site.launch("cancel", "lost")
    assert site.await_state("lost", "cancelled").attempt == 1
    assert site.outcome("lost", 1) == "cancelled cancelled"


@pytest.mark.full
def test_before_the_time_limit_it_saves_and_goes_back_into_the_queue(site: Site) -> None:
    # Slurm sends the signal 60 + 30 s before the limit, to within a minute early: the run has two and a half of five.
    job_id = site.submit("limit", 'launch.time_limit="00:05:00"', "launch.nodes=1", f"max_steps={LONG}")["handle"][
        "job_id"
    ]
    await_true((site.attempt("limit", 0) / "outcome").is_file, END_S, lambda: site.explain("limit"))
    assert site.outcome("limit", 0).startswith("continue the time limit is near")
    saved = max(site.steps("limit"))
    assert (site.folder / "runs" / "limit" / "checkpoints").exists()
    site.hurry(job_id)
    await_true(lambda: max(site.steps("limit")) > saved, START_S, lambda: site.explain("limit"))
    steps = site.steps("limit")  # once: the run goes on
    assert steps == list(range(1, len(steps) + 1))
    site.launch("cancel", "limit", "--now")
    site.await_state("limit", "cancelled")


@pytest.mark.full
def test_a_requeued_job_continues_from_its_newest_checkpoint(site: Site) -> None:
    job_id = site.submit("again", "launch.nodes=1", f"max_steps={LONG}")["handle"]["job_id"]
    site.await_step("again", 6)
    site.slurm("scontrol", "requeue", job_id)
    site.hurry(job_id)
    _assert_continues(site, "again", 1)
    site.launch("cancel", "again", "--now")
    site.await_state("again", "cancelled")


@pytest.mark.full
def test_a_preempted_job_saves_and_continues_afterwards(site: Site) -> None:
    on_n2 = 'launch.sbatch_options=["--nodelist=n2"]'
    overrides = ("launch.nodes=1", "launch.exclusive=true", on_n2, f"max_steps={LONG}")
    job_id = site.submit("yield", *overrides)["handle"]["job_id"]
    site.await_step("yield", 2)
    urgent = ("--partition=urgent", "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    site.slurm("sbatch", *urgent)
    await_true((site.attempt("yield", 0) / "outcome").is_file, END_S, lambda: site.explain("yield"))
    assert site.outcome("yield", 0).startswith("continue the time limit is near, or the job is preempted")
    site.hurry(job_id)
    _assert_continues(site, "yield", 1)
    site.launch("cancel", "yield", "--now")
    site.await_state("yield", "cancelled")


@pytest.mark.full
def test_a_heterogeneous_job_trains_on_one_kind_of_node_and_generates_on_the_other(site: Site) -> None:
    apart = ["cluster.colocated=false", "cluster.generation_workers=1"]
    parts = ["launch.nodes=2", "launch.generation={nodes: 1, cpus_per_node: 1, sbatch_options: [--nodelist=n2]}"]
    job_id = site.submit("parts", *parts, *apart, f"max_steps={LONG}")["handle"]["job_id"]
    site.await_step("parts", 6)
    assert len(set(site.status("parts").nodes)) == 2
    logs = site.folder / "runs" / "parts" / "logs"
    assert _node_of(next(logs.glob("generation-*.log"))) == "n2"
    assert _node_of(next(logs.glob("training-*.log"))) != "n2"
    # Both parts go back into the queue together, and the run continues.
    _kill_node(site, "parts", 1)
    await_true((site.attempt("parts", 0) / "outcome").is_file, END_S, lambda: site.explain("parts"))
    assert site.outcome("parts", 0).startswith("continue node n2 is lost")
    site.hurry(job_id)
    _assert_continues(site, "parts", 1)
    site.launch("cancel", "parts")
    assert site.await_state("parts", "cancelled").attempt == 1


@pytest.mark.parametrize("kinds", [1, 2], ids=["like nodes", "two kinds of nodes"])
def test_slurm_takes_every_option(site: Site, kinds: int) -> None:
    options = ["launch.nodes=2", "launch.gpus_per_node=2", "launch.exclusive=true", "launch.memory_gib_per_node=2"]
    options += ["launch.partition=debug", 'launch.time_limit="1-00:00:00"', "cluster={colocated: false}"]
    options += ['launch.sbatch_options=["--comment=a b", "--nice=10"]', "policy.backend=dtensor", "launch.plan=false"]
    if kinds == 1:
        options += ["launch.seeds=[1,2]", "cluster.generation_workers=1"]
    else:
        options += ["launch.generation={nodes: 1, partition: urgent, memory_gib_per_node: 1, cpus_per_node: 2}"]
        options += ["cluster.generation_workers=2"]
    site.prepared(f"options-{kinds}", *options).write()
    said = site.slurm("sbatch", "--test-only", f"{site.folder}/launches/options-{kinds}/job.sbatch")
    assert "to start at" in said, said
    assert "error" not in said, said


@pytest.mark.full
def test_an_array_has_one_run_per_seed(site: Site) -> None:
    site.submit("seeds", "launch.seeds=[3,4]", "launch.nodes=1", "max_steps=2")
    site.await_state("seeds", "finished", START_S)
    for seed in (3, 4):
        assert site.steps(f"seeds-seed-{seed}") == [1, 2]
        assert f"seed: {seed}\n" in (site.folder / "runs" / f"seeds-seed-{seed}" / "config.yaml").read_text()


@pytest.mark.full
def test_a_mistake_of_the_run_is_not_started_again(site: Site) -> None:
    site.submit("wrong", "launch.nodes=1", "max_steps=2", "launch.setup=cd /nowhere")
    assert site.await_state("wrong", "failed").attempt == 0
    assert "/nowhere" in (site.attempt("wrong", 0) / "node-0.log").read_text()


def test_what_slurm_refuses_is_said_in_its_words(site: Site) -> None:
    ready = site.prepared("refused", "launch.partition=gpus", "max_steps=2")
    with pytest.raises(ResourceError, match="gpus"):
        records.submitted(ready)
    assert not (ready.job.folder / "launch.json").exists()


def test_a_job_whose_submitter_was_killed_is_found_by_its_script(site: Site) -> None:
    ready = site.prepared("orphan", "max_steps=2", 'launch.sbatch_options=["--begin=now+1hour"]')
    records.submitted(ready)
    launch = Launch.read(ready.job.folder)
    replace(launch, handle={}).write()
    found, _, status = records.find(site.folder / "launches", "orphan")
    assert (found.handle, status.state) == (launch.handle, "pending")
    site.slurm("scancel", launch.handle["job_id"])


def _assert_continues(site: Site, name: str, attempt: int) -> None:
    """The attempt goes on from a checkpoint: each step is there once, in order."""
    before = max(site.steps(name))
    await_true(lambda: site.attempt(name, attempt).is_dir(), END_S, lambda: site.explain(name))
    await_true(lambda: max(site.steps(name), default=0) > before + 1, START_S, lambda: site.explain(name))
    steps = site.steps(name)
    assert steps == list(range(1, len(steps) + 1))


def _node_of(log: Path) -> str:
    """Name of the node whose Ray started the worker that writes this log."""
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if path.readlink() != log:
                continue
            raylet = _parent(int(path.parts[2]))
            return _command(raylet).partition("--node-name=")[2].split()[0]
    raise AssertionError(f"no worker writes {log}")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def _kill_node(site: Site, name: str, rank: int) -> None:
    """What a power cut leaves of a node's part: nothing, and no word."""
    agent = json.loads((site.attempt(name, 0) / f"node-{rank}.json").read_text())["pid"]
    family = [agent]
    for pid in family:
        family += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for pid in family:
        os.kill(pid, signal.SIGKILL)
