"""The sandbox of programs: what must not be possible is tried, in the same breath as what must be."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from agent_world import Programs, Script, ScriptedPolicy, play
from nemorl.errors import PluginError
from nemorl_agents.programs import sandbox
from nemorl_agents.programs.sandbox import Sandbox
from recorded_messages import Raises

NO_LANDLOCK = "the kernel has no Landlock that knows ports and signals (Linux 6.12)"


def landlock_version() -> int:
    """0 where there is none."""
    return max(0, ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


ATTEMPTS = """
import socket, subprocess
print(ask("x"))
def tried(name, attempt):
    try:
        attempt()
    except OSError as error:
        return
    print("possible:", name)
secret, other, parent = json.loads(sys.argv[1])
tried("read", lambda: open(secret).read())
tried("list", lambda: os.listdir(os.path.dirname(secret)))
tried("write", lambda: open(secret, "w"))
tried("create", lambda: open("/tmp/nemorl-should-not-be", "w"))
tried("signal", lambda: os.kill(parent, 0))
tried("keeper", lambda: os.kill(os.getppid(), 0))
tried("unix", lambda: socket.socket(socket.AF_UNIX))
tried("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
tried("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW))
tried("netlink", lambda: socket.socket(16, socket.SOCK_RAW))
tried("listen", lambda: socket.create_server(("127.0.0.1", 0)))
tried("other port", lambda: socket.create_connection(("127.0.0.1", other), 5))
tried("environ", lambda: open(f"/proc/{parent}/environ").read())
child = subprocess.Popen(["sleep", "600"])  # what an agent needs: processes of its own, that it may end
child.kill()
print("ended", child.wait())
open("own.txt", "w").write("x")
open(os.path.join(os.environ["HOME"], "own.txt"), "w").write("x")
print(open(__file__).readline() != "")
import asyncio
asyncio.run(asyncio.sleep(0))
print("42")
"""


@pytest.mark.skipif(sys.platform != "linux" or landlock_version() < 6, reason=NO_LANDLOCK)
def test_a_confined_program_does_its_work_and_nothing_else(program: Programs, script: Script, tmp_path: Path) -> None:
    secret = tmp_path.parent / f"{tmp_path.name}-secret.txt"
    secret.write_text("answers")
    kept = tmp_path / "kept"
    with socket.create_server(("127.0.0.1", 0)) as other:
        known = json.dumps([str(secret), other.getsockname()[1], os.getpid()])
        agent = program(script(ATTEMPTS), known, sandbox=True, keep_folders=kept)
        assert play(agent, ScriptedPolicy("17")).reward == 1.0
    [said] = [path.read_text() for path in kept.glob("*/stdout.txt")]
    assert said.split("\n") == ["17", "ended -9", "True", "42", ""]
    agent.close()


def test_a_machine_that_confines_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    monkeypatch.setattr(Sandbox, "prefix", lambda *_: [])
    with raises(PluginError, "reading", "sandbox"):
        asyncio.run(Sandbox.try_out())
    monkeypatch.setattr(Sandbox, "prefix", lambda *_: [sys.executable, "-c", "raise SystemExit('no Landlock')"])
    with raises(PluginError, "Landlock"):
        asyncio.run(Sandbox.try_out())


def test_what_it_reads_is_the_system_the_interpreter_and_the_folders_of_the_command(tmp_path: Path) -> None:
    agent = tmp_path / "project" / "agent.py"
    agent.parent.mkdir()
    agent.touch()
    prefix = Sandbox(["python", str(agent)], [tmp_path / "corpus"]).prefix(tmp_path / "episode", 8000)
    assert str(agent.parent) in prefix[-1]
    assert str(tmp_path / "corpus") in prefix[-1]
    assert str(Path.home()) not in sandbox.SYSTEM_PATHS
