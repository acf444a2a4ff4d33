"""New weights while sequences are half done: they go on, from the new weights, and say so."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from nemorl.errors import BackendError, NemorlError
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl_testing.models import load_reference, response_logprobs, tiny_model
from recorded_messages import Raises
from vllm_engines import changed, gaps, handle_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = (9, 18, 10)
TOLERANCE = 1e-4
LONG = SamplingParams(max_new_tokens=800)
LIMITS = {"max_sequence_tokens": 1000}


def switch_points(completion: Completion, old: Any, new: Any) -> list[int]:
    """Every k for which the first k log-probs are the old model's and the rest the new one's."""
    of_old, of_new = (response_logprobs(model, PROMPT, completion.token_ids) for model in (old, new))
    right_old = [abs(a - b) < TOLERANCE for a, b in zip(completion.logprobs, of_old, strict=True)]
    right_new = [abs(a - b) < TOLERANCE for a, b in zip(completion.logprobs, of_new, strict=True)]
    return [k for k in range(len(of_old) + 1) if all(right_old[:k]) and all(right_new[k:])]


def test_an_update_during_generate_splits_each_completion_between_two_versions(build: Any) -> None:
    old = load_reference(tiny_model())
    new = changed(load_reference(tiny_model()), seed=1)
    engine = build(tiny_model(), handle_of(old, 1), policy=LIMITS)
    requests = [GenerationRequest(PROMPT, LONG, tuple(range(48)))]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, requests)
        # A short request shares the batch: once it has ended, the long ones are under way.
        engine.generate([GenerationRequest(PROMPT, SamplingParams(max_new_tokens=8))])
        engine.update_weights(handle_of(new, 2), 2)
        (completions,) = running.result()
    spanning = [c for c in completions if c.weight_versions == (1, 2)]
    assert spanning, "no completion was still running when the update came"
    assert all(c.weight_versions in ((1,), (1, 2)) for c in completions)
    for completion in completions:
        points = switch_points(completion, old, new)
        assert points, "a log-prob is neither that of the old weights nor that of the new ones"
        if completion.weight_versions == (1, 2):
            assert 0 < points[0] < len(completion.token_ids)


def test_a_later_request_does_not_see_the_old_weights_of_a_running_one(build: Any) -> None:
    old, new = load_reference(tiny_model()), changed(load_reference(tiny_model()), seed=1)
    engine = build(tiny_model(), handle_of(old, 1), policy=LIMITS)
    prompt = tuple(range(8, 88)) * 2  # longer than a block of the prefix cache
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [GenerationRequest(prompt, LONG, tuple(range(16)))])
        engine.generate([GenerationRequest(prompt, SamplingParams(max_new_tokens=4))])
        engine.update_weights(handle_of(new, 2), 2)
        late = [GenerationRequest(prompt, SamplingParams(max_new_tokens=16), (99,))]
        groups = engine.generate(late)
        running.result()
    assert groups[0][0].weight_versions == (2,)
    assert max(gaps(new, late, groups)) < TOLERANCE


def test_a_kept_cache_serves_the_sequences_it_was_made_for_and_no_others(build: Any) -> None:
    old, new = load_reference(tiny_model()), changed(load_reference(tiny_model()), seed=1)
    engine = build(tiny_model(), handle_of(old, 1), policy=LIMITS, recompute_cache=False)
    prompt = tuple(range(8, 88)) * 2  # longer than a block of the prefix cache
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [GenerationRequest(prompt, LONG, tuple(range(16)))])
        engine.generate([GenerationRequest(prompt, SamplingParams(max_new_tokens=4))])
        engine.update_weights(handle_of(new, 2), 2)
        late = [GenerationRequest(prompt, SamplingParams(max_new_tokens=16), (99,))]
        groups = engine.generate(late)
        (completions,) = running.result()
    assert max(gaps(new, late, groups)) < TOLERANCE  # of the same prompt, whose old keys and values are still there
    spanning = [c for c in completions if c.weight_versions == (1, 2)]
    assert spanning, "no completion was still running when the update came"
    for completion in spanning:
        of_old, of_new = (response_logprobs(model, prompt, completion.token_ids) for model in (old, new))
        wrong_old, wrong_new = (
            [abs(a - b) > TOLERANCE for a, b in zip(completion.logprobs, found, strict=True)]
            for found in (of_old, of_new)
        )
        begin = wrong_old.index(True)
        assert begin > 0
        assert sum(wrong_new[begin:]) > len(wrong_new[begin:]) / 2  # the new weights over the old ones' keys and values


@pytest.mark.full
def test_a_failed_update_ends_what_is_in_progress(build: Any, raises: Raises) -> None:
    engine = build(tiny_model(), policy=LIMITS)
    other = load_reference(tiny_model(num_hidden_layers=3))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [GenerationRequest(PROMPT, LONG, tuple(range(48)))])
        engine.generate([GenerationRequest(PROMPT, SamplingParams(max_new_tokens=4))])
        with raises(BackendError, varies=r"\{.*\}"):
            engine.update_weights(handle_of(other, 1), 1)
        with raises(BackendError):
            running.result()


def test_calls_of_several_threads_share_the_batch_and_get_their_own_answers(generator: Any) -> None:
    params = SamplingParams(max_new_tokens=16)
    calls = [[GenerationRequest((seed + 8, 20), params, (seed, seed + 100))] for seed in range(8)]
    alone = [generator.generate(call) for call in calls]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(generator.generate, calls))
    assert [[c.token_ids for c in groups[0]] for groups in together] == [[c.token_ids for c in g[0]] for g in alone]


@pytest.mark.full
def test_a_shutdown_during_generate_is_an_error_there(build: Any, raises: Raises) -> None:
    engine = build(tiny_model(), policy=LIMITS)
    raised: list[NemorlError] = []

    def generate() -> None:
        try:
            engine.generate([GenerationRequest(PROMPT, LONG, tuple(range(64)))])
        except NemorlError as error:
            raised.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    engine.generate([GenerationRequest(PROMPT, SamplingParams(max_new_tokens=4))])
    engine.shutdown()
    thread.join()
    assert [str(error) for error in raised if "shut down" in str(error)]
    with raises(BackendError):
        engine.generate([GenerationRequest(PROMPT, LONG)])
