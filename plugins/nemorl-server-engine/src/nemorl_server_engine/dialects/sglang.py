"""SGLang's server: ``/generate`` with token ids, weights by ``/update_weights_from_disk``.

Not run: its requests are compared with the classes of the published package (``tests/unit/server_engine``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemorl_server_engine.dialects.base import Answer, Ask, Caller, Dialect, Facts, Wanted, field, tokens_of

DETERMINISTIC = "--enable-deterministic-inference"


class SGLangDialect(Dialect):
    """``python -m sglang.launch_server``."""

    name = "SGLang"
    versions = ">=0.5.20,<0.6"
    loads_folders = True
    why_no_folders = ""
    health = "/health"

    def command(self, wanted: Wanted) -> str:
        return (
            f"python -m sglang.launch_server --model-path {wanted.shown_model} --port {wanted.port} {DETERMINISTIC} "
            f"--context-length {wanted.max_tokens} --dtype {wanted.precision}"
        )

    async def facts(self, server: Caller) -> Facts:
        info = await server.get("/server_info")
        model = await server.get("/model_info")
        path = str(field(model, "model_path"))
        found = Facts(
            str(field(info, "version")),
            path,
            path,
            info.get("context_length"),
            dtype=str(info.get("dtype", "")),
            architecture=model.get("model_type"),
        )
        if not info.get("enable_deterministic_inference"):
            problem = "it takes no seeds: a lost response could not be repeated", f"start it with {DETERMINISTIC}"
            return replace(found, problems=(problem,))
        return found

    async def tokenize(self, server: Caller, facts: Facts, text: str) -> list[int]:
        return await tokens_of(server, facts, text)

    async def score(self, server: Caller, facts: Facts, token_ids: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return _prompt_logprobs(await server.post("/generate", body))

    async def sample(self, server: Caller, facts: Facts, ask: Ask) -> Answer:
        payload = await server.post("/generate", sample_body(ask))
        info = field(payload, "meta_info")
        entries = field(info, "output_token_logprobs")  # [log-prob, token, text or null]
        return Answer(
            tuple(field(entry, 1) for entry in entries),
            tuple(field(entry, 0) for entry in entries),
            weight_spans(info),
            (0.0, *_prompt_logprobs(payload)) if ask.sampling.prompt_logprobs else (),
        )

    async def load(self, server: Caller, facts: Facts, folder: Path, name: str) -> None:
        # Requests in progress go back to the queue; what was computed for them is dropped and computed again.
        await server.post("/pause_generation", {"mode": "retract"})
        try:
            body = {"model_path": str(folder), "weight_version": name, "flush_cache": True, "keep_pause": True}
            await server.post("/update_weights_from_disk", body)
        finally:
            await server.post("/continue_generation", {})


def sample_body(ask: Ask) -> dict[str, Any]:
    """The request for one response."""
    sampling = ask.sampling
    return {
        "input_ids": list(ask.token_ids),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": ask.seed,
            "max_new_tokens": ask.max_new_tokens,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": list(ask.stop_ids),
            "ignore_eos": True,  # the end tokens are among the above
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0 if sampling.prompt_logprobs else -1,
        "stream": False,
    }


def _prompt_logprobs(payload: Any) -> list[float]:
    """Of all tokens but the first."""
    return [float(field(entry, 0)) for entry in field(payload, "meta_info", "input_token_logprobs")[1:]]


def weight_spans(info: Any) -> tuple[tuple[str, int], ...]:
    """The weights that drew a response: its spans where it has them, else the one name."""
    spans = info.get("weight_versions")
    if spans:
        return tuple((str(field(span, "version")), int(field(span, "start"))) for span in spans)
    return ((str(field(info, "weight_version")), 0),)
