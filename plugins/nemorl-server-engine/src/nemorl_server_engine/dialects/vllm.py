"""vLLM's server (``vllm serve``): token ids by ``/inference/v1/generate``, weights by its development endpoints.

Checked against a running server of version 0.32. Where the server's workers run nemorl-vllm's extension
(``--worker-extension-cls``), log-probs are taken before truncation and weights are loaded by nemorl's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemorl.errors import BackendError

from nemorl_server_engine.dialects.base import (
    Answer,
    Ask,
    Caller,
    Dialect,
    Facts,
    Logprobs,
    Wanted,
    field,
    sampling_fields,
    tokens_of,
)

EXTENSION = "nemorl_vllm.worker.WorkerExtension"
"""Of nemorl-vllm, which the server's environment then has."""
LOGPROBS: dict[str, Logprobs] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
"""Their name of each kind."""
TEMPERATURES = (0.01, 2.0)
"""vLLM refuses a higher one, and silently raises a lower one: log-probs would not be those of the temperature."""
DEVELOPMENT = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
MODE = ("--logprobs-mode processed_logprobs", "--logprobs-mode raw_logprobs")


class VLLMDialect(Dialect):
    """``vllm serve``."""

    name = "vLLM"
    versions = ">=0.32,<0.33"
    loads_folders = True
    why_no_folders = ""
    health = "/health"

    def command(self, wanted: Wanted) -> str:
        on_cpu = " --enforce-eager --no-enable-chunked-prefill" if wanted.device == "cpu" else ""
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {wanted.shown_model} --port {wanted.port} --enable-scale-out "
            f"--logprobs-mode processed_logprobs --max-model-len {wanted.max_tokens} --dtype {wanted.precision}{on_cpu}"
        )

    async def facts(self, server: Caller) -> Facts:
        version = str(field(await server.get("/version"), "version"))
        model = field(await server.get("/v1/models"), "data", 0)
        root, longest = str(model.get("root") or ""), model.get("max_model_len")
        found = Facts(version, str(field(model, "id")), root, longest, temperatures=TEMPERATURES)
        try:
            info = await server.get("/server_info?config_format=json")
        except BackendError:
            return replace(found, problems=(("it does not say how it was started, nor takes weights", DEVELOPMENT),))
        options = field(info, "vllm_config", "model_config")
        mode = str(field(options, "logprobs_mode"))
        found = replace(found, dtype=str(options.get("dtype", "")).removeprefix("torch."))
        has_extension = info["vllm_config"].get("parallel_config", {}).get("worker_extension_cls") == EXTENSION
        if has_extension:
            await server.post("/collective_rpc", {"method": "nemorl_install_sampler"})
            return replace(found, extension=True)
        if mode not in LOGPROBS:
            return replace(found, problems=((f"it returns {mode}, not log-probs", f"start it with {MODE[0]}"),))
        return replace(found, logprobs=LOGPROBS[mode], problems=tuple(_cpu_problems(info, options)))

    async def tokenize(self, server: Caller, facts: Facts, text: str) -> list[int]:
        return await tokens_of(server, facts, text)

    async def score(self, server: Caller, facts: Facts, token_ids: Sequence[int]) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": facts.model, "token_ids": list(token_ids), "sampling_params": sampling}
        return _prompt_logprobs(await server.post("/inference/v1/generate", body), token_ids)

    async def sample(self, server: Caller, facts: Facts, ask: Ask) -> Answer:
        payload = await server.post("/inference/v1/generate", sample_body(facts, ask))
        choice = field(payload, "choices", 0)
        content = field(choice, "logprobs", "content")
        spans = field(choice, "weight_versions") or []
        return Answer(
            tuple(field(choice, "token_ids")),
            tuple(field(entry, "logprob") for entry in content),
            tuple((str(field(span, "version")), int(field(span, "start"))) for span in spans),
            (0.0, *_prompt_logprobs(payload, ask.token_ids)) if ask.sampling.prompt_logprobs else (),
        )

    async def load(self, server: Caller, facts: Facts, folder: Path, name: str) -> None:
        await server.post("/pause", mode="keep")
        try:
            if facts.extension:
                await server.post("/collective_rpc", {"method": "nemorl_load_folder", "args": [str(folder)]})
            else:
                await server.post(
                    "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                )
            # Keys and values of running requests are computed again, from the new weights.
            await server.post("/reset_prefix_cache", reset_running_requests="true")
            await server.post("/update_weight_version", {"new_version": name})
        finally:
            await server.post("/resume")


def sample_body(facts: Facts, ask: Ask) -> dict[str, Any]:
    """The request for one response."""
    sampling = ask.sampling
    return {
        "model": facts.model,
        "token_ids": list(ask.token_ids),
        "sampling_params": {
            **sampling_fields(ask),
            "detokenize": bool(sampling.stop_strings),
            "logprobs": 0,
            "prompt_logprobs": 0 if sampling.prompt_logprobs else None,
        },
    }


def _prompt_logprobs(payload: Any, token_ids: Sequence[int]) -> list[float]:
    """Of all tokens but the first."""
    places = field(payload, "prompt_logprobs")[1:]
    return [float(field(place, str(token), "logprob")) for place, token in zip(places, token_ids[1:], strict=True)]


def _cpu_problems(info: Any, options: Any) -> list[tuple[str, str]]:
    """What vLLM gets wrong on the CPU, where the extension puts it right."""
    if info["vllm_config"].get("device_config", {}).get("device") != "cpu":
        return []
    if info["vllm_config"].get("scheduler_config", {}).get("enable_chunked_prefill"):
        return [
            (
                "vLLM on the CPU draws other tokens where a prompt is computed in chunks: seeds decide nothing",
                "start it with --no-enable-chunked-prefill",
            )
        ]
    return []
