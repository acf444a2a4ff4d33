"""A chat-completions server on this machine, for tests: real HTTP, and a judge that does as it is told.

It speaks the part of OpenAI's interface that judges need: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | int | tuple[int, dict[str, str]]
"""The text of a reply; or an HTTP status, with headers perhaps."""


@dataclass
class JudgeServer:
    """What it does, and what was asked of it."""

    answer: Callable[[dict[str, Any]], Answer]
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1


def asked(request: dict[str, Any]) -> tuple[str, str, str]:
    """System text, user text and mark of a request."""
    system, user = (message["content"] for message in request["messages"])
    found = re.search(r"<response-([0-9a-f]{16})>", user)
    assert found is not None
    return system, user, found[1]


def verdict(score: object) -> Callable[[dict[str, Any]], str]:
    """A judge that always gives this score, in the form of the line."""
    return lambda request: f"It is fine.\nVERDICT-{asked(request)[2]}: {score}"


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[JudgeServer]:
    """A running server, reachable at ``url``."""
    told = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            text = self.rfile.read(size := int(self.headers["Content-Length"]))
            if len(text) < size:
                return  # whoever asked has gone
            request = json.loads(text)
            told.requests.append(request)
            told.keys.append(self.headers["Authorization"])
            with told.counted():
                said = told.answer(request) if self.path == "/v1/chat/completions" else 404
            if not isinstance(said, str):
                status, headers = said if isinstance(said, tuple) else (said, {})
                self._send(status, {"error": {"message": f"status {status}"}}, headers)
                return
            message = {"role": "assistant", "content": said}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
            about = {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"]}
            self._send(200, {**about, "choices": [choice], "usage": usage}, {})

        def _send(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": len(text), **headers}.items():
                self.send_header(name, str(value))
            with suppress(OSError):  # whoever asked has gone
                self.end_headers()
                self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # so often it looks for its end
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
