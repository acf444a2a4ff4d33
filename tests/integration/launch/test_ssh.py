"""`nemorl launch --on ssh` through a real SSH server on the loopback, and `--on local`."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nemorl_base.ports import free_port
from nemorl_testing.tiny import write_tiny_model
from slurm_cluster import await_true

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PLANTED = "hf_planted-value-9876543210"
LONG = 100_000
START_S = 240
END_S = 120
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launching")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = write_tiny_model(tmp_path_factory.mktemp("model"), **sizes)
    config = {
        "algorithm": "grpo",
        "model": str(model),
        "policy": {"init": "random", "max_sequence_tokens": 64},
        "data": "arithmetic",
        "environment": "math",
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "generation": {"max_new_tokens": 8},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 5, "export": False},
        "cluster": {"workers_per_node": 1},
        "launch": {"name": "ssh", "secrets": ["HF_TOKEN"], "grace_s": 60},
    }
    (folder / "run.json").write_text(json.dumps(config))
    return folder


def launch(folder: Path, *arguments: str) -> Any:
    command = [sys.executable, "-m", "nemorl", "launch", *arguments, "--json"]
    environment = {**os.environ, "HF_TOKEN": PLANTED}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def steps(folder: Path, name: str) -> list[int]:
    path = folder / "runs" / name / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [record["step"] for record in records if "train/loss" in record]


def await_state(folder: Path, name: str, state: str, limit_s: float) -> None:
    def explain() -> str:
        logs = sorted((folder / "launches" / name).rglob("*.log"))
        return "".join(f"\n== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    await_true(lambda: launch(folder, "status", name)["state"] == state, limit_s, explain)


def test_two_nodes_over_ssh_finish_and_no_secret_is_written_down(folder: Path, server: list[str]) -> None:
    # Two names of one machine: each gets ports and a part of Ray of its own.
    hosts = [f"{getpass.getuser()}@127.0.0.1", f"{getpass.getuser()}@localhost"]
    options = [f"launch.hosts={json.dumps(hosts)}", f"launch.ssh_options={json.dumps(server)}"]
    options += [
        "launch.nodes=2",
        "launch.cpus_per_node=1",
        "launch.object_store_gib=0.1",
        "launch.setup=export PLACE=here",
    ]
    launch(folder, "run.json", *options, "max_steps=3", "run_dir=runs/two", "--name", "two")
    assert PLANTED not in _command_lines()
    await_state(folder, "two", "finished", START_S)
    assert steps(folder, "two") == [1, 2, 3]
    noted = [json.loads((folder / f"launches/two/attempt-0/node-{rank}.json").read_text()) for rank in (0, 1)]
    assert [node["name"] for node in noted] == hosts
    holders = [path for path in folder.rglob("*") if path.is_file() and PLANTED.encode() in path.read_bytes()]
    assert holders == []


def test_a_machine_that_does_not_answer_is_named(folder: Path) -> None:
    command = [sys.executable, "-m", "nemorl", "launch", "run.json", "launch.hosts=[127.0.0.1]", "max_steps=1"]
    command += [f"launch.ssh_options=[-p{free_port()}]", "--name", "nobody"]
    environment = {**os.environ, "HF_TOKEN": PLANTED}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "127.0.0.1: ssh: connect to host 127.0.0.1 port" in done.stderr


def test_on_this_machine_a_cancelled_run_is_saved_and_continues_when_launched_again(folder: Path) -> None:
    same = ["run.json", "--on", "local", f"max_steps={LONG}", "run_dir=runs/here", "--name", "here"]
    launch(folder, *same)
    await_true(lambda: max(steps(folder, "here"), default=0) >= 2, START_S)
    launch(folder, "cancel", "here")
    await_state(folder, "here", "cancelled", END_S)
    saved = max(steps(folder, "here"))
    launch(folder, *same)
    await_true(lambda: max(steps(folder, "here")) > saved, START_S)
    launch(folder, "cancel", "here", "--now")
    await_true(lambda: launch(folder, "status", "here")["state"] != "running", END_S)
    assert steps(folder, "here") == list(range(1, len(steps(folder, "here")) + 1))


def _command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)
