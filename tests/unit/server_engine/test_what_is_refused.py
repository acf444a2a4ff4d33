"""Servers that do not fit are refused before the first rollout, answers that make no sense never become samples."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.errors import BackendError, ForeignError
from nemorl.media import Media
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_agents.servers import ServerConfig
from nemorl_rl.models.tiny import write_tiny_model
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

PORT = r"127\.0\.0\.1:\d+|--port \d+"
ONE = [GenerationRequest((9, 10), SamplingParams(max_new_tokens=6))]


def with_weights(folder: Path, *, seed: int) -> Path:
    """A tiny model with random weights on disk."""
    config = AutoConfig.from_pretrained(write_tiny_model(folder))
    torch.manual_seed(seed)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.mul_(10)  # far enough apart to differ in what they say
    model.save_pretrained(folder)
    return folder


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """What the package warns of meanwhile."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nemorl_agents.servers")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def test_an_unknown_version_is_refused(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    server.version = "0.9.2"
    with raises(BackendError, "0.9.2", varies=PORT):
        build(server)


def test_a_server_without_development_mode_is_told_the_command_that_fits(
    serve: Any, build: Any, tiny_model: Path, raises: Any
) -> None:
    server = serve()
    answer = server.reply
    server.reply = lambda path, body: (404, {}) if path == "/server_info" else answer(path, body)
    facts = ("VLLM_SERVER_DEV_MODE=1", tiny_model, server.port, 64)
    with raises(BackendError, *facts, varies=PORT):
        build(server)


def test_weights_that_a_run_left_in_a_server_are_not_taken_for_its_models(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    request = GenerationRequest((9, 10), SamplingParams(max_new_tokens=2), (1,))
    as_started = build(server, value=None).generate([request])
    run = build(server)
    run.generate([request])
    run.shutdown()
    with raises(BackendError, varies=r"nemorl-\w+:\d+"):
        build(server, value=None).generate([request])
    assert build(server).generate([request]) != as_started  # a run gives it its own first


def test_without_a_trainer_a_server_must_have_the_models_own_weights(
    serve: Any, build: Any, tmp_path: Path, raises: Any
) -> None:
    server, own = serve(), with_weights(tmp_path / "own", seed=0)
    compared = {"value": None, "policy": {"model_name": str(own)}, "check_weights_gib": 1.0}
    server.model = shutil.copytree(own, tmp_path / "moved")  # the same model under another name
    assert len(build(server, **compared).generate(ONE)) == 1
    server.model = with_weights(tmp_path / "other", seed=1)  # of the same sizes
    with raises(BackendError, 23, "--port", varies=rf"{PORT}|{tmp_path}|by [\d.]+ nats"):
        build(server, **compared)
    unseen = {**compared, "check_weights_gib": 0.0}  # too large to compare
    with kept_warnings() as warnings:
        build(server, **unseen)
    (warning,) = warnings
    assert warning.startswith(f"{server.url} serves {server.model}: its weights were not compared")
    assert warning.endswith("are more than generation.backend.check_weights_gib")
    assert len(build(server, **{**unseen, "value": 1.0}).generate(ONE)) == 1  # a run gives it its own


def test_a_model_that_transformers_does_not_load_is_not_compared(serve: Any, build: Any, tmp_path: Path) -> None:
    server, own = serve(), with_weights(tmp_path / "own", seed=0)
    server.model = shutil.copytree(own, tmp_path / "moved")
    (own / "model.safetensors").write_bytes(b"half of a download")
    with kept_warnings() as warnings:
        generator = build(server, value=None, policy={"model_name": str(own)}, check_weights_gib=1.0)
    assert len(generator.generate(ONE)) == 1
    (warning,) = warnings
    assert "transformers does not load them here (SafetensorError" in warning


def test_whatever_goes_wrong_as_a_server_is_taken_in_ends_the_wait(
    serve: Any, build: Any, monkeypatch: pytest.MonkeyPatch, raises: Any
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr("nemorl_agents.servers.own_weights.OwnWeights.require", broken)
    with raises(ForeignError, "ZeroDivisionError", varies=PORT):
        build(serve(), value=None)


def test_a_shorter_limit_than_the_runs_is_refused(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    server.max_model_len = 32
    with raises(BackendError, 32, 64, varies=PORT):
        build(server)


def test_a_model_of_another_size_is_refused(serve: Any, build: Any, tmp_path: Path, raises: Any) -> None:
    server = serve()
    server.model = write_tiny_model(tmp_path / "other", hidden_size=48)
    with raises(BackendError, "hidden_size", 48, 32, varies=PORT):
        build(server)


def test_another_tokenizer_is_refused(serve: Any, build: Any, raises: Any) -> None:
    server, tokenize = serve(), serve().tokenize
    server.tokenize = lambda text: [token + 1 for token in tokenize(text)]
    with raises(BackendError, server.url, varies=PORT):
        build(server)


def test_blanks_that_a_tokenizer_drops_are_no_difference(serve: Any, build: Any) -> None:
    server, tokenize = serve(), serve().tokenize
    server.tokenize = lambda text: tokenize(text.replace(" ", ""))
    assert len(build(server).generate(ONE)) == 1


def test_prompts_in_chunks_are_refused_on_the_cpu(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    server.chunked = True
    with raises(BackendError, "no-enable-chunked-prefill", varies=PORT):
        build(server)


def test_a_prompt_that_shows_an_image_is_refused_before_a_server_hears_of_it(
    serve: Any, build: Any, raises: Any
) -> None:
    server, item = serve(), Media("image", b"...")
    engine = build(server)
    shown = GenerationRequest((9, *item.token_ids(2), 10), SamplingParams(max_new_tokens=6), media=(item,))
    before = list(server.calls)
    with raises(BackendError, "images", "media"):
        engine.generate([shown])
    with raises(BackendError, "images", "media"):
        engine.submit(shown).result()
    assert [call for call in server.calls[len(before) :] if "generate" in call] == []
    assert len(engine.generate(ONE)[0]) == 1


@pytest.mark.parametrize(
    ("mode", "sampling", "fits"),
    [
        ("processed_logprobs", {"temperature": 0.6}, True),
        ("processed_logprobs", {"top_p": 0.9}, False),
        ("processed_logprobs", {"top_p": 0.9, "temperature": 0.0}, True),  # greedy truncates nothing
        ("raw_logprobs", {"top_p": 0.9, "top_k": 5, "min_p": 0.1}, True),
        ("raw_logprobs", {"temperature": 0.0}, True),
        ("raw_logprobs", {"temperature": 0.6}, False),
        ("processed_logprobs", {"temperature": 0.005}, False),  # vLLM would sample at 0.01
        ("processed_logprobs", {"temperature": 2.5}, False),
    ],
)
def test_sampling_whose_logprobs_training_could_not_recompute_is_refused(
    serve: Any, build: Any, raises: Any, mode: str, sampling: dict[str, Any], fits: bool
) -> None:
    server = serve()
    server.mode = mode
    engine = build(server)
    request = [GenerationRequest((9, 10), SamplingParams(max_new_tokens=6, **sampling))]
    if fits:
        assert len(engine.generate(request)) == 1
        return
    with raises(BackendError, server.url, varies=PORT):
        engine.generate(request)
    assert not server.prompts


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda choice: choice["logprobs"]["content"].pop(), 5),
        (lambda choice: choice["token_ids"].__setitem__(2, 10**6), 10**6),
        (lambda choice: choice["token_ids"].__setitem__(2, -1), "-1"),
        (lambda choice: choice["token_ids"].__setitem__(2, "7"), "'7'"),
        (lambda choice: choice["logprobs"]["content"][2].update(logprob=float("nan")), "nan"),
        (lambda choice: choice["logprobs"]["content"][2].update(logprob=None), "None"),
        (lambda choice: choice["logprobs"]["content"][2].update(logprob=-9999.0), -9999),
        (lambda choice: choice["logprobs"]["content"][2].update(logprob=0.5), 0.5),
        (lambda choice: choice.pop("token_ids"), "token_ids"),
        (lambda choice: (choice["token_ids"].pop(), choice["logprobs"]["content"].pop()), "5"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(
    serve: Any, build: Any, raises: Any, change: Any, fact: object
) -> None:
    server = serve()
    engine = build(server)

    def changed(answer: dict[str, Any]) -> dict[str, Any]:
        change(answer["choices"][0])
        return answer

    server.change = changed
    with raises(BackendError, fact, varies=r"http://127\.0\.0\.1:\d+|a server"):
        engine.generate(ONE)


def test_another_program_at_the_address_is_refused(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    server.reply = lambda path, body: (200, [1, 2])
    with raises(BackendError, "generation.backend.engine", varies=PORT):
        build(server)


def test_a_server_that_answers_500_to_everything_is_refused_at_once(serve: Any, build: Any, raises: Any) -> None:
    server = serve()
    server.reply = lambda path, body: (500, {"error": {"message": "EngineDeadError"}})
    with raises(BackendError, 500, "EngineDeadError", varies=PORT):
        build(server, reconnect_timeout_s=600.0)
    assert len(server.calls) < 5


def test_a_server_that_starts_is_waited_for(serve: Any, build: Any) -> None:
    server = serve()
    answer = server.reply
    server.reply = lambda path, body: (503, {}) if len(server.calls) < 6 else answer(path, body)
    assert build(server).generate(ONE)


def test_what_a_server_adds_after_a_stop_token_is_cut(serve: Any, build: Any) -> None:
    server = serve()
    engine = build(server)
    [[free]] = engine.generate(ONE)
    third = free.token_ids[2]
    stopped = SamplingParams(max_new_tokens=6, stop_token_ids=(third,))
    [[found]] = engine.generate([GenerationRequest((9, 10), stopped)])  # the fake server stops for no token
    end = free.token_ids.index(third) + 1
    assert found.token_ids == free.token_ids[:end]
    assert found.logprobs == free.logprobs[:end]
    assert found.finish_reason == "stop"


def test_a_redirect_is_not_followed_and_the_key_stays_here(
    serve: Any, build: Any, monkeypatch: pytest.MonkeyPatch, raises: Any
) -> None:
    monkeypatch.setenv("TEST_SERVER_KEY", "hush")
    elsewhere, server = serve(), serve()
    server.redirect_to = elsewhere.url
    with raises(BackendError, 307, varies=PORT) as caught:
        build(server, api_key_env="TEST_SERVER_KEY")
    assert not elsewhere.calls
    assert "hush" not in str(caught.value)


def test_the_key_is_sent_and_written_nowhere(
    serve: Any, build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TEST_SERVER_KEY", "hush-7f3a")
    server = serve()
    server.key = "hush-7f3a"
    engine = build(server, api_key_env="TEST_SERVER_KEY")
    assert len(engine.generate(ONE)) == 1
    engine.shutdown()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"hush-7f3a" in path.read_bytes()]


def test_a_wrong_key_and_a_missing_one_are_told_apart(
    serve: Any, build: Any, monkeypatch: pytest.MonkeyPatch, raises: Any
) -> None:
    server = serve()
    server.key = "right"
    monkeypatch.setenv("TEST_SERVER_KEY", "wrong")
    with raises(BackendError, "TEST_SERVER_KEY", 401, varies=PORT):
        build(server, api_key_env="TEST_SERVER_KEY")
    with raises(BackendError, "generation.backend.api_key_env", varies=PORT):
        build(server)
    monkeypatch.delenv("TEST_SERVER_KEY")
    with raises(BackendError, "TEST_SERVER_KEY"):
        build(server, api_key_env="TEST_SERVER_KEY")


@pytest.mark.parametrize(
    "url",
    ["node7:8000", "ftp://node7", "http://me:secret@node7:8000", "http://node7:8000?x=1", "http://", "http://n:x"],
)
def test_what_is_no_address_is_refused_when_the_config_loads(url: str, raises: Any) -> None:
    from nemorl.config import GenerationConfig

    with raises(ValidationError, path="backend.urls.0") as caught:
        GenerationConfig.model_validate({"backend": {"name": "server", "urls": [url]}})
    assert "secret" not in str(caught.value)


def test_tensorrt_llm_cannot_follow_a_trainer_and_says_why() -> None:
    from nemorl.config import PolicyConfig

    config = ServerConfig(urls=("https://node7:8000",), engine="tensorrt-llm")
    [problem] = config.policy_problems(PolicyConfig(model_name="org/model"), device="cuda:0", is_attached=False)
    assert "node7:8000 is another machine" in problem.message
