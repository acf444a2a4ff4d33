"""Single requests to the backend ``hf``: other architectures than the kit's, and many at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_dtensor.model import load_model
from nemorl_rl.models.tiny import write_tiny_model
from recorded_messages import Raises
from torch import Tensor

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": SIZES,  # by hand
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},  # transformers' cache: rows join in batches
    "rwkv": {**SIZES, "attention_hidden_size": 32, "num_hidden_layers": 3, "rescale_every": 1},  # no cache
}
SAMPLED = SamplingParams(max_new_tokens=16, ignore_eos=True)
LONG = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=100, ignore_eos=True), tuple(range(16)))
WAIT_S = 120.0


def handle(model: Any, version: int) -> WeightHandle:
    def export() -> Iterator[Mapping[str, Tensor]]:
        yield dict(model.named_parameters())

    return in_process_handle(export, version)


def engine(folder: Path, architecture: str = "qwen2", **options: Any) -> tuple[HFGeneration, Any, PolicyConfig]:
    write_tiny_model(folder, architecture=architecture, **ARCHITECTURES[architecture])
    policy = PolicyConfig(model_name=str(folder), init="random", max_sequence_tokens=128)
    model = load_model(policy)
    config = HFGenerationConfig(**options)
    return HFGeneration(GenerationConfig(), policy, WorkerContext(), handle(model, 1), config), model, policy


def logprobs_of(model: Any, ids: tuple[int, ...]) -> Tensor:
    """[T] of each token given those before it, 0.0 for the first; a plain forward pass."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, :-1].float()
    found = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
    return torch.cat((torch.zeros(1), found))


def test_an_observation_that_fails_leaves_nothing_behind(tmp_path: Path, raises: Raises) -> None:
    generator, _, _ = engine(tmp_path)
    request = GenerationRequest((9, 18, 10), SAMPLED, (1, 2))
    expected = generator.generate([request])
    with raises(BackendError):
        generator.observe(GenerationRequest((9,) * 128, SAMPLED, (1,)))
    assert generator.generate([request]) == expected
    assert type(generator._versions.newest.batch._decoder).__name__ == "LlamaDecoder"  # none that records


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_answers_requests_that_come_one_by_one(tmp_path: Path, architecture: str) -> None:
    generator, model, _ = engine(tmp_path, architecture)
    asked = SamplingParams(max_new_tokens=16, ignore_eos=True, prompt_logprobs=True)
    requests = [GenerationRequest(tuple(range(9, 12 + index)), asked, (index, 7)) for index in range(6)]
    for request, future in [(request, generator.submit(request)) for request in requests]:
        for completion in future.result(WAIT_S):
            expected = logprobs_of(model, (*request.token_ids, *completion.token_ids))
            found = torch.tensor((*completion.prompt_logprobs, *completion.logprobs))
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    generator.shutdown()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.slow
def test_new_weights_in_the_middle_of_responses(tmp_path: Path, architecture: str) -> None:
    generator, model, policy = engine(tmp_path, architecture)
    other = load_model(policy, seed=5)
    models = {1: model, 2: other}
    future = generator.submit(LONG)
    generator.update_weights(handle(other, 2), 2)
    for completion in future.result(WAIT_S):
        ends = (*completion.version_starts[1:], len(completion.token_ids))
        for version, start, end in zip(completion.weight_versions, completion.version_starts, ends, strict=True):
            expected = logprobs_of(models[version], (*LONG.token_ids, *completion.token_ids))[3:]
            found = torch.tensor(completion.logprobs)
            torch.testing.assert_close(found[start:end], expected[start:end], atol=1e-4, rtol=0)
    generator.shutdown()


@pytest.mark.parametrize("rows", [256, 5])
@pytest.mark.slow
def test_200_requests_of_16_threads_with_random_cancels_and_updates_lose_and_leak_nothing(
    tmp_path: Path, rows: int
) -> None:
    generator, model, _ = engine(tmp_path, max_batch_rows=rows)
    requests = {n: GenerationRequest((9, 18, 10 + n % 50), SAMPLED, (n, n + 1000)) for n in range(200)}
    futures: dict[int, Future[list[Completion]]] = {}

    def submit(worker: int) -> None:
        rng = random.Random(worker)
        for number in range(worker, 200, 16):
            futures[number] = generator.submit(requests[number])
            if rng.random() < 0.3:
                futures[rng.choice([*futures])].cancel()

    threads = [threading.Thread(target=submit, args=(worker,)) for worker in range(16)]
    for thread in threads:
        thread.start()
    for version in range(2, 5):
        generator.update_weights(handle(model, version), version)
    for thread in threads:
        thread.join()
    assert not wait(futures.values(), WAIT_S).not_done
    answered = {number: future.result() for number, future in futures.items() if not future.cancelled()}
    assert len(answered) > 100
    alone = generator.generate([requests[number] for number in answered])
    for found, expected in zip(answered.values(), alone, strict=True):
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert not generator._state.running
    assert not generator._versions.newest.batch.is_busy
    assert generator.held_bytes()["cache"] == 0
    generator.shutdown()


def test_a_shutdown_ends_what_runs_and_refuses_what_comes(tmp_path: Path, raises: Raises) -> None:
    generator, _, _ = engine(tmp_path)
    future = generator.submit(LONG)
    generator.shutdown()
    error = None if future.cancelled() else future.exception(WAIT_S)
    assert error is None or "shut down" in str(error)  # None: it was answered before
    with raises(BackendError):
        generator.submit(LONG)


def test_an_engine_that_nobody_refers_to_ends_its_thread(tmp_path: Path) -> None:
    generator, _, _ = engine(tmp_path)
    thread = generator._thread
    del generator
    thread.join(WAIT_S)
    assert not thread.is_alive()
