"""TensorRT-LLM's server (``trtllm-serve``): ``/v1/completions`` with token ids. It samples; it cannot follow a trainer.

Not run: its requests are compared with the published request class (``tests/unit/server_engine``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemorl.errors import BackendError

from nemorl_server_engine.dialects.base import Answer, Ask, Caller, Dialect, Facts, Wanted, field, sampling_fields

NO_FOLDERS = (
    "TensorRT-LLM's server loads no folder while it runs: /update_weights takes CUDA memory handles of processes on "
    "its own node, which nemorl does not send"
)


class TensorRTLLMDialect(Dialect):
    """``trtllm-serve``."""

    name = "TensorRT-LLM"
    versions = ">=1.2,<2"
    loads_folders = False
    why_no_folders = NO_FOLDERS
    health = "/health"

    def command(self, wanted: Wanted) -> str:
        return f"trtllm-serve {wanted.shown_model} --port {wanted.port} --max_seq_len {wanted.max_tokens}"

    async def facts(self, server: Caller) -> Facts:
        version = str(field(await server.get("/version"), "version"))
        return Facts(version, str(field(await server.get("/v1/models"), "data", 0, "id")), logprobs="raw", dtype="")

    async def tokenize(self, server: Caller, facts: Facts, text: str) -> list[int]:
        return list(field(await server.post("/_internal/tokenize", {"prompt": text}), "tokens"))

    async def score(self, server: Caller, facts: Facts, token_ids: Sequence[int]) -> list[float]:
        raise BackendError(
            "TensorRT-LLM's server returns no log-probs of a prompt", fix="compare models with vllm or sglang"
        )

    async def sample(self, server: Caller, facts: Facts, ask: Ask) -> Answer:
        choice = field(await server.post("/v1/completions", sample_body(facts, ask)), "choices", 0)
        return Answer(tuple(field(choice, "token_ids")), tuple(field(choice, "logprobs", "token_logprobs")), None)

    async def load(self, server: Caller, facts: Facts, folder: Path, name: str) -> None:
        raise BackendError(NO_FOLDERS, fix="use vllm or sglang to train")


def sample_body(facts: Facts, ask: Ask) -> dict[str, Any]:
    """The request for one response."""
    return {
        "model": facts.model,
        "prompt": list(ask.token_ids),
        **sampling_fields(ask),
        "detokenize": False,
        "logprobs": 1,
    }
