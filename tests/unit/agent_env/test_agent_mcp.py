"""Tools of real MCP servers, written with the ``mcp`` package."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_world import ScriptedPolicy, prompt_of, wants
from agent_world import play as played
from nemorl.errors import UsageError
from nemorl_agents.programs import AgentConfig, ToolsConfig
from pydantic import ValidationError
from recorded_messages import Raises

pytestmark = pytest.mark.slow

pytest.importorskip("mcp", reason="mcp is not installed")

SERVER = """
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")
count = 0

@server.tool()
def multiply(a: int, b: int) -> int:
    "The product of a and b."
    return a * b

@server.tool()
def fail() -> str:
    raise ValueError("the battery is empty")

@server.tool()
async def wait() -> str:
    await asyncio.sleep(600)
    return "at last"

@server.tool()
def counted() -> str:
    "How often it was called."
    global count
    count += 1
    open(os.environ["PIDS"], "a").write(f"{os.getpid()} ") if "PIDS" in os.environ else None
    return str(count)

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
"""


@pytest.fixture
def server(tmp_path: Path) -> str:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return str(path)


def agent(*servers: dict[str, Any], **options: Any) -> Any:
    return AgentConfig(tools={"mcp": servers, **options.pop("tools", {})}, reward="exact_match", **options).build()


def play(environment: Any, policy: ScriptedPolicy) -> Any:
    return played(environment, policy, prompt_of(answer="42"))


def contents(policy: ScriptedPolicy) -> list[str]:
    return [str(message["content"]) for message in policy.heard[-1] if message["role"] == "tool"]


def test_the_policy_calls_the_tools_of_a_server(server: str) -> None:
    policy = ScriptedPolicy(wants("multiply", a=6, b=7), wants("fail", 2), wants("multiply", 3, a="x"), "42")
    score = play(agent({"command": [sys.executable, server]}), policy)
    first, second, third = contents(policy)
    assert first == "42"
    assert second.startswith("error: ")
    assert third.startswith("error")
    assert score.metrics["tool_errors"] == 2.0
    multiply = next(tool["function"] for tool in policy.tools if tool["function"]["name"] == "multiply")
    assert multiply["description"] == "The product of a and b."
    assert multiply["parameters"]["required"] == ["a", "b"]


def test_every_episode_has_a_server_of_its_own_that_ends_with_it(server: str, tmp_path: Path) -> None:
    environment = agent({"command": [sys.executable, server], "env": {"PIDS": str(tmp_path / "pids")}})
    for _ in range(2):
        policy = ScriptedPolicy(wants("counted"), "x")
        play(environment, policy)
        assert contents(policy) == ["1"]
    pids = (tmp_path / "pids").read_text().split()
    assert len({*pids}) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_episode_that_is_cancelled_ends_its_server_too(server: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    environment = agent({"command": [sys.executable, server], "env": {"PIDS": str(pids)}}, tools={"timeout_s": 600.0})

    async def cancel() -> None:
        policy = ScriptedPolicy(wants("counted"), wants("wait", 2), "x")
        task = asyncio.ensure_future(environment.rollout(prompt_of(), policy))
        while not pids.exists() or not pids.read_text().endswith(" "):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not Path(f"/proc/{pids.read_text().strip()}").exists()


@pytest.fixture
def running(server: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, server, "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60.0
    while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < until:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_a_server_at_an_address_is_shared(running: str) -> None:
    environment = agent({"url": running})
    for number in ("1", "2"):
        policy = ScriptedPolicy(wants("counted"), "x")
        play(environment, policy)
        assert contents(policy) == [number]


def test_a_server_that_cannot_be_used_ends_the_run(server: str, tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, "no-such-server", "environment.tools.mcp"):
        play(agent({"command": ["no-such-server"]}), ScriptedPolicy("x"))
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module")
    with raises(UsageError, "broken.py", varies=r"(?<=used: ).*"):
        play(agent({"command": [sys.executable, str(broken)]}, tools={"timeout_s": 20.0}), ScriptedPolicy("x"))


def test_the_package_is_asked_for_when_the_config_loads(monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with raises(ValidationError, "mcp", path="mcp"):
        ToolsConfig(mcp=[{"url": "http://127.0.0.1:9000/mcp"}])  # type: ignore[list-item]


def test_two_tools_of_one_name_are_an_error(server: str, raises: Raises) -> None:
    command = {"command": [sys.executable, server]}
    with raises(UsageError, "multiply", "two"):
        play(agent(command, command), ScriptedPolicy("x"))
