"""A client of the Tinker API in plain HTTP, which retries as the real one does, and at once: for sweeps over kills."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
from nemorl_agents.tinker.wire.messages import messages
from tinker_toy import BASE
from toy_server import KEYS

PATIENCE_S = 30.0


class RawClient:
    """One client."""

    def __init__(
        self, address: str, *, owner: str = "ada", key: str | None = None, revive: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            address: Of the server.
            owner: Whose key it sends.
            key: In place of an owner's.
            revive: Begins the server again after it was killed.
        """
        self._http = httpx.Client(base_url=f"{address}/api/v1", headers={"X-API-Key": key or KEYS[owner]}, timeout=60)
        self._revive = revive

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """The answer, also of a server that had to come back for it."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._http.post(path, content=raw, headers=headers)
            except httpx.TransportError:
                if self._revive is None or time.monotonic() > until:
                    raise
                self._revive()

    def asked(self, path: str, body: Any) -> Any:
        """The JSON of an answer that is fine."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, path: str, body: Any) -> bytes:
        """The answer of a request by future."""
        return self.fetched(self.asked(path, body)["request_id"])

    def fetched(self, request_id: str) -> bytes:
        """The answer of a future."""
        while True:
            answer = self.post("/retrieve_future", {"request_id": request_id}, Accept="application/x-protobuf")
            assert answer.status_code == 200, answer.text
            if b'"try_again"' not in answer.content:
                return answer.content

    def session(self) -> str:
        return str(self.asked("/create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})["session_id"])

    def model(self, session: str, number: int = 0, *, seed: int = 1) -> str:
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": BASE,
            "lora_config": {"rank": 4, "seed": seed},
        }
        return str(json.loads(self.result("/create_model", body))["model_id"])


def pass_bytes(
    model_id: str, seq: int, token_ids: Sequence[int], *, loss: str = "cross_entropy", forward_only: bool = False
) -> bytes:
    """A body of ``forward_backward`` with one datum, weights of 1."""
    pb = messages()
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(token_ids[:-1], dtype=np.int32).tobytes()
    for name, values, dtype, kind in (
        ("target_tokens", token_ids[1:], np.int64, pb.DTYPE_INT64),
        ("weights", [1.0] * (len(token_ids) - 1), np.float32, pb.DTYPE_FLOAT32),
    ):
        field = datum.loss_fn_inputs[name]
        field.dense, field.dtype = np.array(values, dtype=dtype).tobytes(), kind
        field.shape.append(len(token_ids) - 1)
    raw: bytes = message.SerializeToString()
    return raw


def step_body(model_id: str, seq: int, learning_rate: float = 0.05) -> dict[str, Any]:
    return {"model_id": model_id, "seq_id": seq, "adam_params": {"learning_rate": learning_rate}, "type": "optim_step"}
