"""What is sent to engines that cannot run here, against the request classes that their makers publish.

The fields below are those of sglang 0.5.23 (``GenerateReqInput``, ``SamplingParams``, ``UpdateWeightFromDiskReqInput``,
``PauseGenerationReqInput``, ``ContinueGenerationReqInput``, ``TokenizeRequest``) and of TensorRT-LLM's
``CompletionRequest`` (``tensorrt_llm/serve/openai_protocol.py``), as far as they are sent. Where the wheel of sglang
is at hand (``SGLANG_WHEEL``, e.g. of ``pip download --no-deps sglang==0.5.23``) its source is read instead.
"""

from __future__ import annotations

import ast
import asyncio
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import BackendError
from nemorl.types import SamplingParams
from nemorl_server_engine.dialects import dialect
from nemorl_server_engine.dialects.base import Ask, Facts

ASK = Ask(
    (5, 6), SamplingParams(temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, stop_strings=("##",)), 2**62 + 3, 12, (2, 9)
)
FACTS = Facts("1", "org/model")

SGLANG = {
    "GenerateReqInput": {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"},
    "SamplingParams": {
        *("temperature", "top_p", "top_k", "min_p", "sampling_seed", "max_new_tokens", "stop", "stop_token_ids"),
        *("ignore_eos", "no_stop_trim", "skip_special_tokens"),
    },
    "UpdateWeightFromDiskReqInput": {"model_path", "weight_version", "flush_cache", "keep_pause"},
    "PauseGenerationReqInput": {"mode"},
    "ContinueGenerationReqInput": {"torch_empty_cache"},
    "TokenizeRequest": {"model", "prompt", "add_special_tokens"},
}
SGLANG_FILES = {
    "GenerateReqInput": "sglang/srt/managers/io_struct.py",
    "SamplingParams": "sglang/srt/sampling/sampling_params.py",
    "UpdateWeightFromDiskReqInput": "sglang/srt/managers/io_struct.py",
    "PauseGenerationReqInput": "sglang/srt/managers/io_struct.py",
    "ContinueGenerationReqInput": "sglang/srt/managers/io_struct.py",
    "TokenizeRequest": "sglang/srt/entrypoints/openai/protocol.py",
}
SGLANG_ROUTES = {
    "/generate": "GenerateReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
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


@pytest.fixture
def fields() -> Mapping[str, set[str]]:
    """Fields of sglang's classes."""
    wheel = os.environ.get("SGLANG_WHEEL")
    if wheel is None:
        return SGLANG
    with zipfile.ZipFile(wheel) as files:
        return {name: declared(files.read(file).decode(), name) for name, file in SGLANG_FILES.items()}


def declared(source: str, name: str) -> set[str]:
    """Annotated names in the body of a class."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    raise AssertionError(f"there is no class {name}")


def test_sglangs_classes_have_every_field_that_is_sent(fields: Mapping[str, set[str]], tmp_path: Path) -> None:
    spoken, server = dialect("sglang"), Recorder({"/generate": SGLANG_ANSWER, "/tokenize": {"tokens": [5]}})

    async def everything() -> None:
        await spoken.sample(server, FACTS, ASK)
        await spoken.score(server, FACTS, (5, 6))
        await spoken.tokenize(server, FACTS, "a")
        await spoken.load(server, FACTS, tmp_path, "nemorl-a:4")

    asyncio.run(everything())
    assert {path for path, _ in server.sent} == SGLANG_ROUTES.keys()
    for path, body in server.sent:
        assert body.keys() <= fields[SGLANG_ROUTES[path]], path
        assert body.get("sampling_params", {}).keys() <= fields["SamplingParams"]


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


def test_vllms_class_takes_what_is_sent() -> None:
    """Against vLLM's own classes, where it is installed."""
    pytest.importorskip("vllm")
    from nemorl_server_engine.dialects.vllm import sample_body
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    request = GenerateRequest.model_validate(sample_body(FACTS, ASK))
    assert request.token_ids == [5, 6]
    sampling = request.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 4, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.logprobs) == (2**62 + 3, 12, 0)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (["##"], [2, 9], True)
