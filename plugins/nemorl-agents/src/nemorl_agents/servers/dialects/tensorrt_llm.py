"""TensorRT-LLM's server (``trtllm-serve``): ``/v1/completions`` with token ids, ``/update_weights`` with handles.

Not run: its requests are compared with the published request classes (``tests/unit/server_engine``). It answers neither
log-probs of prompts nor which weights drew a token, so that weights are compared by ``rollouts.mismatch_limit`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError

from nemorl_agents.servers.dialects.base import Answer, Ask, Caller, Dialect, Facts, Wanted, field, sampling_fields
from nemorl_agents.servers.sending import device_name, handles, parts, pickled
from nemorl_agents.servers.ways import Way

if TYPE_CHECKING:
    from torch import Tensor


class TensorRTLLMDialect(Dialect):
    """``trtllm-serve``."""

    name = "TensorRT-LLM"
    versions = ">=1.2,<2"
    ways: Mapping[Way, str] = {"tensor": "on the GPU of the run, with orchestrator_type: ray in its options"}
    scores = False

    def command(self, wanted: Wanted) -> str:
        return f"trtllm-serve {wanted.shown_model} --port {wanted.port} --max_seq_len {wanted.max_tokens}"

    async def facts(self, server: Caller) -> Facts:
        version = str(field(await server.get("/version"), "version"))
        model = str(field(await server.get("/v1/models"), "data", 0, "id"))
        return Facts(version, model, logprobs="raw", dtype="", ways=frozenset({"tensor"}))

    async def tokenize(self, server: Caller, facts: Facts, text: str) -> list[int]:
        return list(field(await server.post("/_internal/tokenize", {"prompt": text}), "tokens"))

    async def score(self, server: Caller, facts: Facts, token_ids: Sequence[int]) -> list[float]:
        raise BackendError(
            "TensorRT-LLM's server returns no log-probs of a prompt", fix="compare models with vllm or sglang"
        )

    async def sample(self, server: Caller, facts: Facts, ask: Ask) -> Answer:
        choice = field(await server.post("/v1/completions", sample_body(facts, ask)), "choices", 0)
        return Answer(tuple(field(choice, "token_ids")), tuple(field(choice, "logprobs", "token_logprobs")), None)

    async def open_handles(self, server: Caller, facts: Facts, tensors: Mapping[str, Tensor], name: str) -> None:
        device = device_name(tensors)
        for names, _ in parts(tensors):
            await server.post("/update_weights", handles_body({each: tensors[each] for each in names}, device))
        await server.post("/update_weights", {"weights": None})  # all have come; it drops its cache


def handles_body(tensors: Mapping[str, Tensor], device: str) -> dict[str, Any]:
    """Handles of some tensors, under the name of their GPU. The server waits for its requests to end first."""
    opened = list(zip(tensors, handles(tensors), strict=True))
    return {"weights": {f"GPU-{device}": pickled(opened)}}


def sample_body(facts: Facts, ask: Ask) -> dict[str, Any]:
    """The request for one response."""
    return {
        "model": facts.model,
        "prompt": list(ask.token_ids),
        **sampling_fields(ask),
        "detokenize": False,
        "logprobs": 1,
    }
