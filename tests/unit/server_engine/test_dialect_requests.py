"""What is sent to engines that cannot run here, against the request classes that their makers publish.

``sglang_classes.json`` has sglang's (``published_engines.py`` derives it from a wheel; ``SGLANG_WHEEL`` names one to
compare it with). TensorRT-LLM publishes no code on PyPI: the fields below are those of ``CompletionRequest`` and
``UpdateWeightsRequest`` (``tensorrt_llm/serve/openai_protocol.py``). vLLM's classes are those of the installed package.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.errors import BackendError
from nemorl.types import SamplingParams
from nemorl_agents.servers.dialects import dialect
from nemorl_agents.servers.dialects.base import Ask, Facts
from nemorl_tensors.engines.broadcast import Meeting
from published_engines import read_wheel, sglang_classes

ASK = Ask(
    (5, 6), SamplingParams(temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, stop_strings=("##",)), 2**62 + 3, 12, (2, 9)
)
FACTS = Facts("1", "org/model")

SGLANG = sglang_classes()
SGLANG_ROUTES = {
    "/generate": "GenerateReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/tokenize": "TokenizeRequest",
}
TENSORRT_LLM = {
    *("model", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "detokenize", "include_stop_str_in_output", "logprobs"),
}


class Recorder:
    """Answers what it is told to, and keeps what was sent."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.sent: list[tuple[str, Any]] = []

    async def get(self, path: str) -> Any:
        return self.answers[path]

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        self.sent.append((path, body))
        return self.answers.get(path, {})


SGLANG_ANSWER = {
    "output_ids": [7, 2],
    "meta_info": {
        "weight_version": "nemorl-a:4",
        "weight_versions": [
            {"version": "nemorl-a:3", "start": 0, "end": 1},
            {"version": "nemorl-a:4", "start": 1, "end": 2},
        ],
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]],
        "input_token_logprobs": [[None, 5, None], [-1.5, 6, None]],
    },
}


MEETING = Meeting("10.0.0.1", 29500, ranks=3)
TENSORS = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.ones(4)}
NAME = "nemorl-a:4"


async def sent_already(names: Sequence[str]) -> None:
    """A broadcast whose receivers are not there."""


def require_sglangs(path: str, body: Mapping[str, Any]) -> None:
    """A request has fields of its class alone, and all that it must have."""
    known = SGLANG[SGLANG_ROUTES[path]]
    assert body.keys() <= known.keys(), path
    assert {field for field, is_required in known.items() if is_required} <= body.keys(), path


def test_the_file_of_sglangs_classes_is_what_the_wheel_has() -> None:
    wheel = os.environ.get("SGLANG_WHEEL")
    if wheel is None:
        pytest.skip("SGLANG_WHEEL names no wheel: pip download --no-deps sglang==0.5.23")
    assert read_wheel(Path(wheel)) == SGLANG


def test_sglangs_classes_have_every_field_that_is_sent(tmp_path: Path) -> None:
    spoken, server = dialect("sglang"), Recorder({"/generate": SGLANG_ANSWER, "/tokenize": {"tokens": [5]}})

    async def everything() -> None:
        await spoken.sample(server, FACTS, ASK)
        await spoken.score(server, FACTS, (5, 6))
        await spoken.tokenize(server, FACTS, "a")
        await spoken.load(server, FACTS, tmp_path, NAME)
        await spoken.join(server, FACTS, MEETING)
        await spoken.receive(server, FACTS, TENSORS, sent_already, NAME)
        await spoken.open_handles(server, FACTS, {}, NAME)

    asyncio.run(everything())
    assert {path for path, _ in server.sent} == SGLANG_ROUTES.keys()
    for path, body in server.sent:
        require_sglangs(path, body)
        assert body.get("sampling_params", {}).keys() <= SGLANG["SamplingParams"].keys()


def test_sglang_is_given_tensors_in_parts_of_which_the_last_names_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes of a and 16 of b exceed one part of 20."""
    monkeypatch.setattr("nemorl_agents.servers.sending.PART_BYTES", 20)
    server, broadcast = Recorder({}), []

    async def send(names: Sequence[str]) -> None:
        broadcast.append(names)

    asyncio.run(dialect("sglang").receive(server, FACTS, TENSORS, send, NAME))
    assert [path for path, _ in server.sent] == [
        *("/pause_generation", "/begin_weight_update"),
        *("/update_weights_from_distributed", "/update_weights_from_distributed"),
        *("/end_weight_update", "/continue_generation"),
    ]
    parts = [body for path, body in server.sent if path == "/update_weights_from_distributed"]
    group = {"group_name": "nemorl_weights"}
    assert parts == [
        {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "flush_cache": False, **group},
        {
            **{"names": ["b"], "dtypes": ["float32"], "shapes": [[4]], "flush_cache": True},
            "weight_version": NAME,
            **group,
        },
    ]
    assert broadcast == [("a",), ("b",)]


def test_sglangs_workers_meet_the_run_as_rank_0() -> None:
    server = Recorder({})
    asyncio.run(dialect("sglang").join(server, FACTS, MEETING))
    [(_, body)] = server.sent
    assert body == {
        **{"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3},
        **{"group_name": "nemorl_weights", "backend": "gloo"},
    }


def test_tensors_for_sglang_open_with_torch_alone() -> None:
    """What its ``SafeUnpickler`` lets in of torch: functions that rebuild tensors, and plain types."""
    server = Recorder({})
    facts = replace(FACTS, ranks=2)
    asyncio.run(dialect("sglang").open_handles(server, facts, {"a": torch.arange(3.0)}, NAME))
    [body] = [body for path, body in server.sent if path == "/update_weights_from_tensor"]
    one, other = body["serialized_named_tensors"]  # one per process
    assert one == other
    [(name, tensor)] = pickle.loads(base64.b64decode(one))
    assert (name, tensor.tolist()) == ("a", [0.0, 1.0, 2.0])


def test_sglang_is_asked_for_exactly_this() -> None:
    server = Recorder({"/generate": SGLANG_ANSWER})
    answer = asyncio.run(dialect("sglang").sample(server, FACTS, ASK))
    [(_, body)] = server.sent
    assert body["input_ids"] == [5, 6]
    assert body["sampling_params"] == {
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "sampling_seed": 2**62 + 3},
        **{"max_new_tokens": 12, "stop": ["##"], "stop_token_ids": [2, 9], "ignore_eos": True},
        **{"no_stop_trim": True, "skip_special_tokens": False},
    }
    assert answer.token_ids == (7, 2)
    assert answer.logprobs == (-0.5, -0.25)
    assert answer.weights == (("nemorl-a:3", 0), ("nemorl-a:4", 1))
    assert asyncio.run(dialect("sglang").score(server, FACTS, (5, 6))) == [-1.5]


def test_sglang_goes_on_although_it_could_not_load(tmp_path: Path) -> None:
    class Refusing(Recorder):
        async def post(self, path: str, body: Any = None, **query: str) -> Any:
            await super().post(path, body)
            if path == "/update_weights_from_disk":
                raise BackendError("no such folder")

    server = Refusing({})
    with pytest.raises(BackendError):
        asyncio.run(dialect("sglang").load(server, FACTS, tmp_path, "nemorl-a:4"))
    assert [path for path, _ in server.sent] == [
        *("/pause_generation", "/update_weights_from_disk", "/continue_generation")
    ]


def test_sglang_without_seeds_does_not_fit() -> None:
    info = {"version": "0.5.23", "context_length": 2048, "dtype": "bfloat16", "enable_deterministic_inference": False}
    server = Recorder({"/server_info": info, "/model_info": {"model_path": "org/model", "model_type": "qwen2"}})
    facts = asyncio.run(dialect("sglang").facts(server))
    assert (facts.version, facts.max_tokens, facts.architecture) == ("0.5.23", 2048, "qwen2")
    assert "--enable-deterministic-inference" in facts.problems[0][1]
    info["enable_deterministic_inference"] = True
    assert not asyncio.run(dialect("sglang").facts(server)).problems


def test_tensorrt_llms_class_has_every_field_that_is_sent() -> None:
    choice = {"token_ids": [7, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}}
    server = Recorder({"/v1/completions": {"choices": [choice]}})
    answer = asyncio.run(dialect("tensorrt-llm").sample(server, FACTS, ASK))
    [(_, body)] = server.sent
    assert body.keys() <= TENSORRT_LLM  # it forbids others
    assert (body["prompt"], body["seed"], body["stop_token_ids"]) == ([5, 6], 2**62 + 3, [2, 9])
    assert (answer.token_ids, answer.logprobs, answer.weights) == ((7, 2), (-0.5, -0.25), None)


def test_tensorrt_llms_weights_come_under_the_name_of_their_gpu() -> None:
    """``UpdateWeightsRequest.weights: dict[str, str] | None``: handles by device, in base64; ``None`` once all came.

    A worker opens ``(name, (function, arguments))`` (``tensorrt_llm/llmapi/rlhf_utils.py``).
    """
    from nemorl_agents.servers.dialects.tensorrt_llm import handles_body

    body = handles_body({"b": torch.ones(2)}, "1f2e")
    [(device, text)] = body.pop("weights").items()
    assert (device, body) == ("GPU-1f2e", {})
    [(name, (function, arguments))] = pickle.loads(base64.b64decode(text))
    assert (name, function(*arguments).tolist()) == ("b", [1.0, 1.0])


def test_vllms_classes_take_what_weights_are_announced_with() -> None:
    """Its own backends ``nccl`` and ``ipc``, which cannot run here, against their classes."""
    pytest.importorskip("vllm")
    from nemorl_agents.servers.dialects.base import meeting_place
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    found = NCCLWeightTransferInitInfo(**meeting_place(MEETING))
    assert (found.master_address, found.master_port) == ("10.0.0.1", 29500)
    assert (found.rank_offset, found.world_size, found.packed) == (1, 3, False)  # one tensor after the other
    server = Recorder({})
    asyncio.run(dialect("vllm").receive(server, FACTS, TENSORS, sent_already, NAME))
    bodies = dict(server.sent)
    update = NCCLWeightTransferUpdateInfo(**bodies["/update_weights"]["update_info"])
    assert (update.names, update.dtype_names) == (["a", "b"], ["bfloat16", "float32"])
    assert update.shapes == [[2, 3], [4]]
    assert [path for path, _ in server.sent] == [
        *("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/reset_prefix_cache", "/update_weight_version", "/resume"),
    ]


def test_vllms_class_of_handles_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from nemorl_agents.servers.dialects.vllm import ipc_info
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    # An engine that was built in this process makes vLLM read its variables no more.
    monkeypatch.setattr("vllm.envs.VLLM_ALLOW_INSECURE_SERIALIZATION", True)
    found = IPCWeightTransferUpdateInfo(**ipc_info(TENSORS, "1f2e"))
    assert found.names == ["a", "b"]
    assert isinstance(found.ipc_handles, list)
    assert [list(handles) for handles in found.ipc_handles] == [["1f2e"], ["1f2e"]]


def test_vllms_class_takes_what_is_sent() -> None:
    """Against vLLM's own classes, where it is installed."""
    pytest.importorskip("vllm")
    from nemorl_agents.servers.dialects.vllm import sample_body
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    request = GenerateRequest.model_validate(sample_body(FACTS, ASK))
    assert request.token_ids == [5, 6]
    sampling = request.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 4, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.logprobs) == (2**62 + 3, 12, 0)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (["##"], [2, 9], True)
