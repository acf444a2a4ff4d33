"""Clients of other people's servers: no redirect, no bomb, no endless reply; and nobody makes a client of his own."""

from __future__ import annotations

import ast
import asyncio
import gzip
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nemorl.errors import BackendError, UsageError
from nemorl_rl.serving.http_clients import RedirectRefusedError, ReplyTooLargeError, http_client, read_json
from nemorl_tasks.environments.judge.client import JudgeClient

ROOT = Path(__file__).parents[3]
MiB = 2**20
CLIENTS = {"AsyncClient", "Client", "ClientSession", "HTTPConnection", "HTTPSConnection"}
CLIENTS |= {"build_opener", "urlopen", "urlretrieve"}
"""What makes a client: of httpx, httpx2, aiohttp, urllib and http.client."""
MADE_IN = {
    "toolkits/nemorl-rl/src/nemorl_rl/serving/http_clients.py": {"AsyncClient", "Client"},
    # It goes to the policy's own gateway, from a process that has no nemorl.
    "plugins/nemorl-agents/src/nemorl_agents/interop/workers/relay.py": {"ClientSession"},
    # The SDK of the Model Context Protocol makes its own, which follows redirects within the address that was given.
    "plugins/nemorl-agents/src/nemorl_agents/programs/mcp_tools.py": {"Client"},
    # Its one request may go through a proxy of the environment, has a deadline for all of it, and follows no redirect.
    "toolkits/nemorl-cli/src/nemorl_cli/directory/indexes.py": {"build_opener"},
    # It asks the index that pip names how large a file is, and reads no reply.
    "plugins/nemorl-insight/src/nemorl_insight/doctor/upgrades/resolving.py": {"urlopen"},
}


class Trap(ThreadingHTTPServer):
    """Two addresses in one: what it is asked for decides how it misbehaves, and it notes whoever comes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.elsewhere: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Trap

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.path.split("/")[1]
        if kind == "elsewhere":
            self.server.elsewhere.append(self.path)
            self._send(b"{}")
        elif kind.isdigit():
            self._send(b"", int(kind), Location=f"http://localhost:{self.server.server_port}/elsewhere")
        elif kind == "bomb":
            self._send(gzip.compress(bytes(32 * MiB)), 200, **{"Content-Encoding": "gzip"})
        else:
            self._send(bytes(4 * MiB))

    do_POST = do_GET  # noqa: N815

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the client has enough
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def trap() -> Iterator[Trap]:
    with Trap() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def post(url: str, **options: Any) -> Any:
    async with http_client(timeout_s=10, max_reply_bytes=MiB) as client:
        return await client.post(url, json={"task": "secret"}, **options)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_whatever_a_call_asks_for(trap: Trap, status: int) -> None:
    for options in ({}, {"follow_redirects": True}):
        with pytest.raises(RedirectRefusedError, match="localhost"):
            asyncio.run(post(f"{trap.url}/{status}", **options))
    with pytest.raises(RedirectRefusedError):
        read_json(f"{trap.url}/{status}", timeout_s=10)
    assert trap.elsewhere == []


@pytest.mark.parametrize("kind", ["bomb", "long"])
def test_a_reply_is_bounded_by_what_it_unpacks_to(trap: Trap, kind: str) -> None:
    with pytest.raises(ReplyTooLargeError):
        asyncio.run(post(f"{trap.url}/{kind}"))
    with pytest.raises(ReplyTooLargeError):
        read_json(f"{trap.url}/{kind}", timeout_s=10)


def test_no_proxy_of_the_environment_sees_a_request(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"{trap.url}/elsewhere")
    assert asyncio.run(post(f"{trap.url}/elsewhere")).status_code == 200
    assert trap.elsewhere == ["/elsewhere"], "asked as a server, not as a proxy"


@pytest.mark.parametrize("status", [307, 308])
def test_a_judge_that_sends_us_elsewhere_ends_the_run_and_nothing_goes_there(trap: Trap, status: int) -> None:
    options = {"url": f"{trap.url}/{status}", "model": "m", "api_key_env": "NONE", "deadline_s": 10.0, "retries": 0}
    judge = JudgeClient(SimpleNamespace(**options, options={}, concurrency=1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="redirects"):
        asyncio.run(judge.ask({"model": "m", "messages": [{"role": "user", "content": "the reference"}]}))
    assert trap.elsewhere == []


def test_an_engine_that_sends_us_elsewhere_is_refused(trap: Trap) -> None:
    from nemorl_agents.servers.connection import Connection

    async def ask() -> None:
        options = SimpleNamespace(api_key_env=None, timeout_s=10.0, tls_ca=None, max_concurrency=1)
        connection = Connection(trap.url, options, "vllm serve")  # type: ignore[arg-type]
        try:
            await connection.post("/307", {"prompt": "x"})
        finally:
            await connection.close()

    with pytest.raises(BackendError, match="redirects"):
        asyncio.run(ask())
    assert trap.elsewhere == []


def test_nobody_makes_a_client_of_his_own() -> None:
    made: dict[str, set[str]] = {}
    for folder in ("core", "toolkits", "plugins", *ROOT.glob("nemorl-*")):
        for file in (ROOT / folder).rglob("src/**/*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                called = node.func if isinstance(node, ast.Call) else None
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
                if name in CLIENTS:
                    made.setdefault(str(file.relative_to(ROOT)), set()).add(name)
    assert made == MADE_IN
