"""Single requests to a real vLLM engine: many at once, cancelled at random, with new weights in between."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, wait
from typing import Any

import pytest
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl_testing.models import load_reference, response_logprobs, tiny_model
from vllm_engines import handle_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SAMPLED = SamplingParams(max_new_tokens=16, ignore_eos=True)
WAIT_S = 300.0


def test_200_requests_of_16_threads_with_random_cancels_and_updates_lose_and_leak_nothing(build: Any) -> None:
    model = load_reference(tiny_model())
    generator = build(tiny_model(), handle_of(model, 1))
    requests = {n: GenerationRequest((9, 18, 10 + n % 50), SAMPLED, (n,)) for n in range(200)}
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
    for version in (2, 3):
        generator.update_weights(handle_of(model, version), version)
    for thread in threads:
        thread.join()
    assert not wait(futures.values(), WAIT_S).not_done
    answered = {number: future.result() for number, future in futures.items() if not future.cancelled()}
    assert len(answered) > 100
    for number, (completion,) in answered.items():
        assert len(completion.token_ids) == 16
        wanted = response_logprobs(model, requests[number].token_ids, completion.token_ids, 1.0)
        assert completion.logprobs == pytest.approx(wanted, abs=1e-4)
    assert not generator._state.running
    assert not generator._requests._samples
    assert not generator._requests._numbers
    assert not generator._requests.engine.has_unfinished_requests()
