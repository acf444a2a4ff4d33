"""SGLang's server: ``/generate`` with token ids; weights by ``/update_weights_from_disk``, ``_from_distributed`` and
``_from_tensor``.

Not run: its requests are compared with the classes of the published package (``tests/unit/server_engine``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl_agents.servers.dialects.base import (
    Answer,
    Ask,
    Caller,
    Dialect,
    Facts,
    Send,
    Wanted,
    announcement,
    field,
    meeting_place,
    weight_spans,
)
from nemorl_agents.servers.sending import Announced, Opener, both, parts, shared_tensors, torch_group
from nemorl_agents.servers.ways import Way

if TYPE_CHECKING:
    from nemorl_tensors.engines.broadcast import Meeting
    from torch import Tensor

DETERMINISTIC = "--enable-deterministic-inference"
GROUP = "nemorl_weights"
EVERY_WAY = frozenset[Way]({"folder", "distributed", "tensor"})


class SGLangDialect(Dialect):
    """``python -m sglang.launch_server``."""

    name = "SGLang"
    versions = ">=0.5.20,<0.6"
    ways: Mapping[Way, str] = {
        "folder": "as usual",
        "distributed": "with --dp-size 1 and --pp-size 1",
        "tensor": "on the GPUs of the run's machine",
    }

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
            ways=_ways(info),
            ranks=int(info.get("tp_size") or 1),
        )
        if not info.get("enable_deterministic_inference"):
            problem = "it takes no seeds: a lost response could not be repeated", f"start it with {DETERMINISTIC}"
            return replace(found, problems=(problem,))
        return found

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
            weight_spans(info.get("weight_versions")) or ((str(field(info, "weight_version")), 0),),
            (0.0, *_prompt_logprobs(payload)) if ask.sampling.prompt_logprobs else (),
        )

    async def load(self, server: Caller, facts: Facts, folder: Path, name: str) -> None:
        async with _paused(server):
            body = {"model_path": str(folder), "weight_version": name, "flush_cache": True, "keep_pause": True}
            await server.post("/update_weights_from_disk", body)

    def carrier(self, facts: Facts, device: str) -> tuple[str, Opener]:
        return "nccl" if device.startswith("cuda") else "gloo", torch_group

    async def join(self, server: Caller, facts: Facts, meeting: Meeting) -> None:
        await server.post("/init_weights_update_group", group_body(meeting))

    async def receive(self, server: Caller, facts: Facts, tensors: Mapping[str, Tensor], send: Send, name: str) -> None:
        async with _paused(server), _updating(server):
            for names, is_last in parts(tensors):
                announced = Announced.of((each, tensors[each]) for each in names)
                body = {**announcement(announced, "dtypes"), **_ending(name, is_last=is_last), "group_name": GROUP}
                await both(server.post("/update_weights_from_distributed", body), send(names))

    async def open_handles(self, server: Caller, facts: Facts, tensors: Mapping[str, Tensor], name: str) -> None:
        async with _paused(server), _updating(server):
            for names, is_last in parts(tensors):
                shared = shared_tensors({each: tensors[each] for each in names})
                body = {"serialized_named_tensors": [shared] * facts.ranks, **_ending(name, is_last=is_last)}
                await server.post("/update_weights_from_tensor", body)


@asynccontextmanager
async def _paused(server: Caller) -> AsyncIterator[None]:
    """Requests in progress go back to the queue; what was computed for them is dropped and computed again."""
    await server.post("/pause_generation", {"mode": "retract"})
    try:
        yield
    finally:
        await server.post("/continue_generation", {})


@asynccontextmanager
async def _updating(server: Caller) -> AsyncIterator[None]:
    """Weights may be loaded within, in parts."""
    await server.post("/begin_weight_update", {})
    try:
        yield
    finally:
        await server.post("/end_weight_update", {})


def group_body(meeting: Meeting) -> dict[str, Any]:
    """The group that workers join."""
    return {**meeting_place(meeting), "group_name": meeting.name, "backend": meeting.carrier}


def _ending(name: str, *, is_last: bool) -> dict[str, Any]:
    """The last part names the weights, and drops what was computed with those before."""
    return {"flush_cache": is_last, **({"weight_version": name} if is_last else {})}


def _ways(info: Mapping[str, Any]) -> frozenset[Way]:
    # Workers take their place in a group by their tensor-parallel rank alone.
    is_one_replica = (info.get("dp_size") or 1) == 1 and (info.get("pp_size") or 1) == 1
    return EVERY_WAY if is_one_replica else EVERY_WAY - {"distributed"}


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
