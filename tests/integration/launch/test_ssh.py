"""`nemorl launch --on ssh` through a real SSH server on the loopback, and `--on local`."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import END_S, LONG, START_S, Launches, command_lines, write_run
from nemorl.resources.ports import free_port
from slurm_cluster import await_true

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PLANTED = "hf_planted-value-9876543210"
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """An SSH server of this user; yields the options with which ``ssh`` reaches it."""
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(sshd).is_file() or shutil.which("ssh") is None:
        pytest.skip("no SSH server here: install openssh-server and openssh-client")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    (folder / "config").write_text(SERVER.format(port=port, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([sshd, "-D", "-f", folder / "config", "-E", folder / "log"])
    known = f"-oUserKnownHostsFile={folder}/known"
    yield [f"-p{port}", f"-i{folder}/key", "-oStrictHostKeyChecking=accept-new", known, "-oIdentitiesOnly=yes"]
    process.terminate()
    process.wait()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Launches:
    folder = tmp_path_factory.mktemp("launching")
    write_run(folder, model, name="ssh")
    return Launches(folder, {"HF_TOKEN": PLANTED})


@pytest.mark.full
def test_two_nodes_over_ssh_finish_and_no_secret_is_written_down(here: Launches, server: list[str]) -> None:
    # Two names of one machine: each gets ports and a part of Ray of its own.
    hosts = [f"{getpass.getuser()}@127.0.0.1", f"{getpass.getuser()}@localhost"]
    options = [f"launch.hosts={json.dumps(hosts)}", f"launch.ssh_options={json.dumps(server)}"]
    options += [
        "launch.nodes=2",
        "launch.cpus_per_node=1",
        "launch.object_store_gib=0.1",
        "launch.setup=export PLACE=here",
    ]
    here.launch("run.json", *options, "max_steps=3", "run_dir=runs/two", "--name", "two")
    assert PLANTED not in command_lines()
    here.await_state("two", "finished", START_S)
    assert here.steps("two") == [1, 2, 3]
    noted = [json.loads((here.attempt("two", 0) / f"node-{rank}.json").read_text()) for rank in (0, 1)]
    assert [node["name"] for node in noted] == hosts
    assert here.holders(PLANTED) == []


def test_a_machine_that_does_not_answer_is_named(here: Launches) -> None:
    nobody = ["launch.hosts=[127.0.0.1]", f"launch.ssh_options=[-p{free_port()}]", "--name", "nobody"]
    done = here.nemorl("launch", "run.json", "max_steps=1", *nobody)
    assert done.returncode == 2
    assert "127.0.0.1: ssh: connect to host 127.0.0.1 port" in done.stderr


@pytest.mark.full
def test_on_this_machine_a_cancelled_run_is_saved_and_continues_when_launched_again(here: Launches) -> None:
    same = ["run.json", "--on", "local", f"max_steps={LONG}", "run_dir=runs/here", "--name", "here"]
    here.launch(*same)
    await_true(lambda: max(here.steps("here"), default=0) >= 2, START_S)
    here.launch("cancel", "here")
    here.await_state("here", "cancelled")
    saved = max(here.steps("here"))
    here.launch(*same)
    await_true(lambda: max(here.steps("here")) > saved, START_S)
    here.launch("cancel", "here", "--now")
    await_true(lambda: here.status("here").state != "running", END_S)
    steps = here.steps("here")  # once: the run goes on
    assert steps == list(range(1, len(steps) + 1))
