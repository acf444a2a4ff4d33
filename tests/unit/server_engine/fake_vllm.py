"""A server that speaks vLLM's dialect on loopback and "samples" by a hash of weights, prompt and seed.

What vLLM itself answers is tested with vLLM (``tests/integration/server_engine``); here servers die, lie and come back.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_agents.servers.checks import true_logprobs
from nemorl_agents.servers.dialects.vllm import EXTENSION
from nemorl_agents.servers.versions import WrittenWeights
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_tensors.engines.broadcast import BroadcastGroup, Meeting
from safetensors.torch import load_file

Reply = tuple[int, Any]


class FakeVLLM:
    """One server. Attributes may be changed while it runs."""

    def __init__(self, model: Path, port: int = 0, *, weights: float = -1.0, takes_tensors: bool = False) -> None:
        self.model, self.weights, self.name = model, weights, "default"
        self.takes_tensors = takes_tensors
        """It was started with nemorl's extension and transfer."""
        self._group: BroadcastGroup | None = None
        self.version, self.max_model_len, self.mode, self.chunked = "0.32.0", 64, "processed_logprobs", False
        self.tokenize: Callable[[str], list[int]] = Tokenizer.load(str(model)).encode_observation
        self.key: str | None = None
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        """Applied to every answer of a sample."""
        self.before_sample: Callable[[int], None] = lambda count: None
        """Called with the number of samples so far, in the thread of the request."""
        self.redirect_to: str | None = None
        self.loads: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self.calls: list[str] = []
        self._count = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._sockets: set[Any] = set()
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """Stop listening and cut all connections, as the system does for a killed process."""
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._sockets):
            with suppressed():
                connection.shutdown(2)
            connection.close()

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        model = {"id": "tiny", "root": str(self.model), "max_model_len": self.max_model_len}
        options = {"model_config": {"logprobs_mode": self.mode, "dtype": "torch.float32"}}
        options |= {"device_config": {"device": "cpu"}, "scheduler_config": {"enable_chunked_prefill": self.chunked}}
        plain: dict[str, Any] = {
            "/health": None,
            "/version": {"version": self.version},
            "/v1/models": {"data": [model]},
            "/server_info": {"vllm_config": {**options, **self._own_code()}},
            "/start_weight_update": {},
            "/finish_weight_update": {},
            "/pause": {},
            "/resume": {},
            "/reset_prefix_cache": {"success": True},
        }
        if path in plain:
            return 200, plain[path]
        if path == "/tokenize":
            return 200, {"tokens": self.tokenize(body["prompt"])}
        if path == "/init_weight_transfer_engine":
            self._join(body["init_info"])
            return 200, {}
        if path == "/update_weights":
            return self._receive(body["update_info"])
        if path == "/collective_rpc" and body["method"] == "nemorl_install_sampler":
            return 200, {"results": [None]}
        if path == "/collective_rpc":
            given = body["args"][0] if self.takes_tensors else body["kwargs"]["weights_path"]
            folder = Path(given)
            self.weights = float(load_file(folder / "model.safetensors")["w"])
            self.loads.append(folder.name)
            return 200, {"results": [None]}
        if path == "/update_weight_version":
            self.name = body["new_version"]
            return 200, {}
        if path == "/inference/v1/generate":
            return self.sample(body)
        return 404, {"detail": "Not Found"}

    def _own_code(self) -> dict[str, Any]:
        extension = EXTENSION if self.takes_tensors else ""
        transfer = {"backend": "nemorl"} if self.takes_tensors else None
        return {"parallel_config": {"worker_extension_cls": extension}, "weight_transfer_config": transfer}

    def _join(self, where: dict[str, Any]) -> None:
        meeting = Meeting(where["master_address"], where["master_port"], where["world_size"])
        self._group = BroadcastGroup(meeting, where["rank_offset"], timeout_s=20.0)

    def _receive(self, announced: dict[str, Any]) -> Reply:
        assert self._group is not None
        [name], [dtype], [shape] = announced["names"], announced["dtype_names"], announced["shapes"]
        value = self._group.broadcast(torch.empty(shape, dtype=getattr(torch, dtype)))
        self.weights = float(value)
        self.loads.append(name)
        return 200, {}

    def sample(self, body: dict[str, Any]) -> Reply:
        with self._count:
            self.prompts.append(tuple(body["token_ids"]))
            count = len(self.prompts)
        self.before_sample(count)
        wanted = body["sampling_params"]
        draw = random.Random(repr((self.weights, body["token_ids"], wanted.get("seed"))))
        ids = [draw.randrange(10, 40) for _ in range(wanted["max_tokens"])]
        content = [{"token_id": token, "logprob": -1.0 - token / 100} for token in ids]
        choice = {
            "token_ids": ids,
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.name, "start": 0}],
        }
        answer: dict[str, Any] = {"choices": [choice]}
        if wanted.get("prompt_logprobs") is not None:
            true = true_logprobs(WrittenWeights(0, self.model, 0, 0.0), body["token_ids"])
            scored = zip(body["token_ids"][1:], true, strict=True)
            answer["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in scored)]
        return 200, self.change(answer)


def _handler(server: FakeVLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            server._sockets.add(self.connection)

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(json.loads(text) if text else {})

        def _answer(self, body: dict[str, Any]) -> None:
            path = urlsplit(self.path).path
            server.calls.append(path)
            if server.redirect_to is not None:
                self.send_response(307)
                self.send_header("Location", server.redirect_to + path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
                status, answer = 401, {"error": "Unauthorized"}
            else:
                status, answer = server.reply(path, body)
            content = json.dumps(answer).encode()
            with suppressed():
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def suppressed() -> Iterator[None]:
    """Whoever asked may be gone, or we are."""
    with suppress(OSError, ValueError):
        yield


def weights_of(value: float, version: int) -> WeightHandle:
    """One tensor, from which a fake server takes what its tokens depend on."""
    return in_process_handle(lambda: iter([{"w": torch.tensor(value)}]), version)
