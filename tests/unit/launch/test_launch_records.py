"""Looking after launches as a stranger would: wrong names, jobs that are gone, submitters that were killed, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import Command
from nemorl.base.files.ownership import Ownership
from nemorl.errors import ResourceError, RunInUseError, UsageError
from nemorl_ops.launch import detached, records
from nemorl_ops.launch.attempts import Attempt, Outcome
from nemorl_ops.launch.base import Launch
from nemorl_ops.launch.prepare import Prepared, prepare
from nemorl_ops.launch.slurm import SlurmConfig
from recorded_messages import Raises

ROOT = Path("launches")
SLURM = """#!{python} -IS
import sys
from pathlib import Path
place, (program, *words) = Path({folder!r}), [Path(sys.argv[0]).name, *sys.argv[1:]]
with (place / "calls").open("a") as calls:
    print(program, *words, file=calls)
answer = place / (program if "--me" not in words else "queue")
if answer.with_suffix(".error").exists():
    sys.exit(answer.with_suffix(".error").read_text())
print(answer.read_text() if answer.exists() else "", end="")
"""


class Site:
    """A login node whose Slurm answers with what stands in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        for program in ("sbatch", "squeue", "scancel"):
            path = self.folder / program
            path.write_text(SLURM.format(python=sys.executable, folder=f"{folder}/answers"))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        (self.folder / "answers").mkdir()

    def answers(self, program: str, text: str) -> None:
        (self.folder / "answers" / program).write_text(text)

    def refuses(self, program: str, text: str) -> None:
        (self.folder / "answers" / f"{program}.error").write_text(text)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "answers" / "calls"
        return [line.partition(" ")[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def site(run_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(run_yaml.parent / "bin")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    found.answers("sbatch", "4711\n")
    return found


def prepared(run_yaml: Path, name: str = "a", on: str = "slurm") -> Prepared:
    return prepare(run_yaml, [], on=on, name=name, root=ROOT)


def test_a_job_is_recorded_before_and_after_it_is_submitted(
    run_yaml: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    submit = SlurmConfig.submit
    monkeypatch.setattr(
        SlurmConfig, "submit", lambda self, job: seen.append(Launch.read(job.folder).handle) or submit(self, job)
    )
    assert records.submitted(prepared(run_yaml)) == {"job_id": "4711"}
    assert seen == [{}]
    assert Launch.read(ROOT.absolute() / "a").handle == {"job_id": "4711"}


def test_a_job_whose_submitter_was_killed_is_found_again_and_not_submitted_twice(
    run_yaml: Path, site: Site, nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: SlurmConfig, job: object) -> dict[str, Any]:
        raise KeyboardInterrupt  # after sbatch, before the record

    with monkeypatch.context() as patch:
        patch.setattr(SlurmConfig, "submit", killed)
        with pytest.raises(KeyboardInterrupt):
            records.submitted(prepared(run_yaml))
    script = ROOT.absolute() / "a" / "job.sbatch"
    # Two jobs of this user in the queue, the parts of this one among them (4711 and 4712 share the script).
    site.answers("queue", f"4242|/elsewhere/job.sbatch\n4712|{script}\n4711|{script}\n")
    site.answers("squeue", "PENDING|Resources|\n")
    found = nemorl("launch", "status", "a", "--json").json
    assert (found["state"], found["handle"]) == ("pending", {"job_id": "4711"})
    with pytest.raises(UsageError, match="pending"):
        records.submitted(prepared(run_yaml))
    assert "sbatch" not in site.calls


def test_a_submission_that_reached_nobody_can_be_repeated(
    run_yaml: Path, site: Site, nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepared(run_yaml)
    ready.write()
    Launch(ready.job, "slurm", ready.launcher.model_dump(mode="json"), {}, 0.0).write()
    found = nemorl("launch", "status", "a", "--json").json
    assert (found["state"], found["detail"]) == ("failed", "its submission was cut off, and nothing of it is found")
    for verb in (("cancel", "a"), ("logs", "a"), ("attach", "a")):
        done = nemorl("launch", *verb)
        assert done.code == 2
        assert "a has no job" in done.err
    assert records.submitted(prepared(run_yaml)) == {"job_id": "4711"}


def test_a_refused_submission_leaves_the_record_of_before(run_yaml: Path, site: Site) -> None:
    site.refuses("sbatch", "sbatch: error: invalid account")
    with pytest.raises(ResourceError, match="account"):
        records.submitted(prepared(run_yaml))
    assert not (ROOT / "a" / "launch.json").exists()
    (site.folder / "answers" / "sbatch.error").unlink()
    records.submitted(prepared(run_yaml))
    site.answers("squeue", "COMPLETED|None|n0\n")
    site.refuses("sbatch", "sbatch: error: invalid account")
    with pytest.raises(ResourceError):
        records.submitted(prepared(run_yaml))
    assert Launch.read(ROOT.absolute() / "a").handle == {"job_id": "4711"}


def test_two_who_launch_at_once_submit_once(run_yaml: Path, site: Site) -> None:
    ready = prepared(run_yaml)
    ready.job.folder.mkdir(parents=True)
    other = Ownership(ready.job.folder)
    with pytest.raises(RunInUseError):
        records.submitted(ready)
    other.close()
    assert site.calls == []


def test_a_controller_that_does_not_answer_is_not_a_job_that_is_gone(
    run_yaml: Path, site: Site, nemorl: Command
) -> None:
    records.submitted(prepared(run_yaml))
    site.refuses("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    found = nemorl("launch", "status", "a", "--json").json
    assert found["state"] == "unknown"
    assert "Unable to contact slurm controller" in found["detail"]
    with pytest.raises(UsageError, match="squeue"):
        records.submitted(prepared(run_yaml))
    # Forgotten, on the other hand: the job is over, and left no word.
    site.refuses("squeue", "slurm_load_jobs error: Invalid job id specified")
    found = nemorl("launch", "status", "a", "--json").json
    assert found["state"] == "failed"
    assert "Slurm does not know it any more" in found["detail"]


def test_one_damaged_record_hides_no_other_launch(run_yaml: Path, site: Site, nemorl: Command) -> None:
    site.answers("squeue", "RUNNING|None|n[0-1]\n")
    records.submitted(prepared(run_yaml))
    (ROOT / "broken").mkdir()
    (ROOT / "broken" / "launch.json").write_text("{")
    found = nemorl("launch", "status", "--json").json
    assert [(each["name"], each["state"]) for each in found] == [("a", "running"), ("broken", "unknown")]
    assert "broken" in nemorl("launch", "status").out


def test_wrong_names_are_met_with_the_nearest(run_yaml: Path, site: Site, nemorl: Command) -> None:
    records.submitted(prepared(run_yaml, "maths-1"))
    assert "Did you mean 'maths-1'?" in nemorl("launch", "cancel", "math-1").err
    assert "Did you mean 'status'?" in nemorl("launch", "stauts").err
    assert "launched are: maths-1" in nemorl("launch", "logs", "x").err


def test_logs_before_there_are_any_and_where_the_run_never_began(run_yaml: Path, site: Site, nemorl: Command) -> None:
    records.submitted(prepared(run_yaml))
    site.answers("squeue", "PENDING|Resources|\n")
    done = nemorl("launch", "logs", "a")
    assert (done.code, done.out) == (2, "")
    assert "a has no output yet" in done.err
    log = ROOT / "a" / "slurm-4711.log"
    log.write_text("error: node n1 does not see the folder\n")
    assert nemorl("launch", "logs", "a").out == log.read_text()
    attempt = ROOT / "a" / "attempt-0"
    attempt.mkdir()
    (attempt / "node-0.log").write_text("waiting\n")
    assert nemorl("launch", "logs", "a").out == "waiting\n"
    (attempt / "run.log").write_text("step 1\n")
    assert nemorl("launch", "logs", "a").out == "step 1\n"
    assert nemorl("launch", "logs", "a", "--json").json["command"][-1] == str(attempt.absolute() / "run.log")


def test_attach_says_what_it_would_run_and_refuses_what_is_not_there(
    run_yaml: Path, site: Site, nemorl: Command
) -> None:
    records.submitted(prepared(run_yaml))
    site.answers("squeue", "RUNNING|None|n3\n")
    assert "node 0 of a has not come up yet" in nemorl("launch", "attach", "a").err
    attempt = ROOT / "a" / "attempt-0"
    attempt.mkdir()
    (attempt / "node-0.json").write_text(json.dumps({"name": "n3", "pid": 1}))
    command = nemorl("launch", "attach", "a", "--json").json["command"]
    assert command[:2] == ["srun", "--jobid=4711"]
    assert "--nodelist=n3" in command
    assert "nodes 0 to 0" in nemorl("launch", "attach", "a", "--node", "1").err


@pytest.mark.slow
def test_ctrl_c_ends_logs_that_are_followed_and_nothing_else(run_yaml: Path, site: Site) -> None:
    records.submitted(prepared(run_yaml))
    (ROOT / "a" / "slurm-4711.log").write_text("waiting for resources\n")
    command = [sys.executable, "-m", "nemorl", "launch", "logs", "a", "-f"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting for resources\n"
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def started(words: str, folder: Path) -> dict[str, Any]:
    """A detached process with these words in its arguments, which Linux shows a moment after it has begun."""
    handle = detached.start(["bash", "-c", "sleep 99; true", words], folder / "log", folder, {})
    while words.encode() not in Path(f"/proc/{handle['pid']}/cmdline").read_bytes():
        assert detached.is_alive(handle)
    return handle


def test_a_detached_process_is_found_by_its_words(tmp_path: Path) -> None:
    words = f"{tmp_path}/attempt-"
    assert detached.find(words) is None
    handle = started("elsewhere", tmp_path)
    other = started(f"{words}0", tmp_path)
    assert detached.find(words) == other
    for each in (handle, other):
        detached.kill(each)
        os.waitpid(each["pid"], 0)
    assert detached.find(words) is None


def test_a_killed_program_does_not_go_on_because_its_children_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_busy_machine(pid: int, kind: int) -> None:
        send(pid, kind)
        time.sleep(0.3)

    program = "sleep 98 & sleep 99 & echo all; wait -n; echo on; sleep 97; true"
    handle = detached.start(["bash", "-c", program], tmp_path / "log", tmp_path, {})
    while (tmp_path / "log").read_text() != "all\n":
        assert detached.is_alive(handle)
    below = psutil.Process(handle["pid"]).children()
    send = os.kill
    monkeypatch.setattr(os, "kill", on_a_busy_machine)
    detached.kill(handle)
    assert os.waitpid(handle["pid"], 0)[1] == signal.SIGKILL
    assert (tmp_path / "log").read_text() == "all\n"
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below):
        time.sleep(0.01)


def test_a_run_that_has_only_begun_is_not_taken_for_the_one_before(
    run_yaml: Path, nemorl: Command, raises: Raises
) -> None:
    ready = prepared(run_yaml, on="local")
    before = Attempt(ready.job.folder / "attempt-0")
    before.folder.mkdir(parents=True)
    before.conclude(Outcome("failed", "of yesterday"))
    agent = run_yaml.parent / "python"
    agent.write_text("#!/bin/sh\necho loading\nexec sleep 99\n")  # takes its time before it says anything
    agent.chmod(0o755)
    handle = records.submitted(prepare(run_yaml, [f"launch.python={agent}"], on="local", name="a", root=ROOT))
    try:
        found = nemorl("launch", "status", "a", "--json").json
        assert (found["state"], found["attempt"]) == ("running", 1)
        with raises(UsageError, "a", "running"):
            records.submitted(prepared(run_yaml, on="local"))
        while not (log := ROOT / "a" / "output.log").read_text():
            assert detached.is_alive(handle)
        assert nemorl("launch", "logs", "a").out == log.read_text() == "loading\n"
        assert nemorl("launch", "cancel", "a").code == 0
        assert Attempt(ready.job.folder / "attempt-1").stop_reason == "cancelled"
    finally:
        detached.kill(handle)
        os.waitpid(handle["pid"], 0)


def test_a_local_run_that_cannot_start_leaves_what_was_there(run_yaml: Path, raises: Raises) -> None:
    with raises(ResourceError):
        records.submitted(prepare(run_yaml, ["launch.python=/no/python"], on="local", name="a", root=ROOT))
    assert not list((ROOT / "a").glob("attempt-*"))
    assert not (ROOT / "a" / "launch.json").exists()


SSH = """#!{python} -IS
import os, sys
host, remote = sys.argv[-2:]
if host == "gone":
    sys.exit(255)
os.execv("/bin/sh", ["sh", "-c", remote])
"""


def test_machines_that_answer_are_freed_though_another_one_does_not(
    run_yaml: Path, site: Site, nemorl: Command
) -> None:
    path = site.folder / "ssh"
    path.write_text(SSH.format(python=sys.executable))
    path.chmod(0o755)
    job = prepare(run_yaml, ["launch.hosts=[gone,here]", "launch.nodes=2"], on="ssh", name="a", root=ROOT)
    job.write()
    (job.job.folder / "attempt-0").mkdir()
    handle = started("agent", run_yaml.parent)
    nodes = [{"host": "gone", "pid": 1, "identity": "x"}, {"host": "here", **handle}]
    Launch(job.job, "ssh", job.launcher.model_dump(mode="json"), {"nodes": nodes}, 0.0).write()
    done = nemorl("launch", "cancel", "a", "--now")
    assert done.code == 2
    assert "not ended at once: gone" in done.err
    assert os.waitpid(handle["pid"], 0)[1] == signal.SIGKILL
    assert nemorl("launch", "status", "a", "--json").json["state"] == "cancelled"


def test_a_local_run_whose_submitter_was_killed_is_found_and_cancelled(run_yaml: Path, nemorl: Command) -> None:
    ready = prepared(run_yaml, on="local")
    ready.write()
    Launch(ready.job, "local", ready.launcher.model_dump(mode="json"), {}, time.time()).write()
    handle = started(f"{ready.job.folder}/attempt-0", run_yaml.parent)
    launch, _, status = records.find(ROOT, "a")
    assert (launch.handle, status.state) == (handle, "running")
    assert nemorl("launch", "cancel", "a", "--now").code == 0
    os.waitpid(handle["pid"], 0)
    assert nemorl("launch", "status", "a", "--json").json["state"] == "cancelled"
    assert "a is cancelled already" in nemorl("launch", "cancel", "a").err
