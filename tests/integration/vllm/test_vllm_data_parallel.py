"""Data-parallel attention: two ranks with requests of their own that share the experts of a mixture.

What they say is compared with transformers, and token by token with an engine of one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.errors import BackendError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import Digests
from nemorl_tensors.engines.digests import digests
from nemorl_testing.models import load_reference, tiny_model
from recorded_messages import Raises
from vllm_engines import build_generator, changed, gaps, handle_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.full]

SIZES: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
TOLERANCE = 1e-4
UNEQUAL = [
    GenerationRequest(
        (9, 18, 10 + length), SamplingParams(max_new_tokens=length, temperature=0.7), (length, length + 50)
    )
    for length in (2, 5, 11, 17, 24)
]
"""Prompts whose responses end one after the other, so that at the end one rank has nothing left to compute."""
LONG = SamplingParams(max_new_tokens=150)


@pytest.fixture(scope="module")
def mixture() -> Path:
    return tiny_model(**SIZES)


@pytest.fixture(scope="module", params=[False, True], ids=["divided experts", "whole experts"])
def ranks(mixture: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    built = build_generator(mixture, data_parallel_size=2, expert_parallel=request.param)
    yield built
    built.shutdown()


def unfinished(generator: Any) -> list[int]:
    """Samples that run on each rank."""
    found: list[int] = generator._call(lambda engine: [rank.get_num_unfinished_requests() for rank in engine.ranks])
    return found


def test_ranks_say_what_one_engine_says_before_and_after_updates(ranks: Any, build: Any, mixture: Path) -> None:
    model, alone = changed(load_reference(mixture), seed=3), build(mixture)
    for engine in (alone, ranks):
        engine.update_weights(handle_of(model, 0), 0)
    experts = sum(4 * parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    assert ranks.held_bytes()["weights"] == alone.held_bytes()["weights"] - experts // 2  # the rest is on both
    for version in (1, 2, 3):
        groups, wanted = ranks.generate(UNEQUAL), alone.generate(UNEQUAL)
        assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in wanted]
        assert max(gaps(model, UNEQUAL, groups)) < TOLERANCE
        with torch.no_grad():  # the experts alone, every other time, so that nothing else can hide their absence
            for name, parameter in model.named_parameters():
                parameter.mul_(1 + 2 * ("experts" in name) * (version % 2))
        if version % 2 == 0:
            changed(model, seed=version)
        assert max(gaps(model, UNEQUAL, groups)) > 0.1, "the change is too small to prove anything"
        for engine in (alone, ranks):
            engine.update_weights(handle_of(model, version), version)
    groups = ranks.generate(UNEQUAL)
    assert max(gaps(model, UNEQUAL, groups)) < TOLERANCE
    assert {c.weight_versions for group in groups for c in group} == {(3,)}


def test_a_request_of_one_rank_alone_is_answered(ranks: Any, mixture: Path) -> None:
    model = load_reference(mixture)
    ranks.update_weights(handle_of(model, 4), 4)
    for _ in range(2):  # the other rank has nothing from the first step on
        assert max(gaps(model, UNEQUAL[:1], ranks.generate(UNEQUAL[:1]))) < TOLERANCE


def test_requests_go_where_the_fewest_are_and_cancelled_ones_make_room(ranks: Any) -> None:
    begun = ranks.submit_all([GenerationRequest((20 + place,), LONG, (1, 2)) for place in range(4)])
    assert unfinished(ranks) == [4, 4]  # two seeds of a prompt stay together
    begun[0].cancel()
    begun[2].cancel()
    assert unfinished(ranks) == [0, 4]
    begun += ranks.submit_all([GenerationRequest((30 + place,), LONG) for place in range(2)])
    assert unfinished(ranks) == [2, 4]
    for answer in begun:
        answer.cancel()
    assert unfinished(ranks) == [0, 0]
    with pytest.raises(CancelledError):
        begun[1].result()
    assert ranks.generate(UNEQUAL[:2])


def test_an_update_reaches_sequences_of_both_ranks_between_the_same_two_tokens(ranks: Any, mixture: Path) -> None:
    old, new = load_reference(mixture), changed(load_reference(mixture), seed=5)
    ranks.update_weights(handle_of(old, 5), 5)
    requests = [GenerationRequest((40 + place, 9), LONG, (7,)) for place in range(2)]
    begun = ranks.submit_all(requests)
    ranks.generate([GenerationRequest((9,), SamplingParams(max_new_tokens=4))])
    ranks.update_weights(handle_of(new, 6), 6)
    switched = []
    for request, answer in zip(requests, begun, strict=True):
        (completion,) = answer.result()
        assert completion.weight_versions == (5, 6)
        of_old, of_new = (gaps(model, [request], [[completion]]) for model in (old, new))
        switched.append(next(place for place, gap in enumerate(of_old) if gap > TOLERANCE))
        assert max(of_new[switched[-1] :]) < TOLERANCE
    assert switched[0] == switched[1] > 0  # as they step together and began together


def test_ranks_sleep_and_wake_with_new_weights(ranks: Any, mixture: Path) -> None:
    model = load_reference(mixture)
    assert all(held > 0 for held in ranks.held_bytes().values())
    ranks.sleep(2)
    assert not any(ranks.held_bytes().values())
    ranks.wake(["weights", "cache"])
    ranks.update_weights(handle_of(model, 8), 8)
    assert max(gaps(model, UNEQUAL, ranks.generate(UNEQUAL))) < TOLERANCE


def test_ranks_prove_together_what_they_hold(ranks: Any, mixture: Path) -> None:
    model = load_reference(mixture)
    sent = digests(dict(model.named_parameters()))
    ranks.update_weights(replace(handle_of(model, 9), digests=Digests(sent)), 9)
    assert ranks.held_digests(list(sent)) == sent


def test_the_loss_of_a_rank_ends_the_engine_and_nobody_waits(build: Any, mixture: Path, raises: Raises) -> None:
    before = set(active_children())
    engine = build(mixture, data_parallel_size=2)
    begun = engine.submit_all([GenerationRequest((20 + place,), LONG, (1, 2)) for place in range(2)])
    workers = sorted(set(active_children()) - before, key=lambda child: child.name)
    assert len(workers) == 2
    assert unfinished(engine) == [2, 2]
    os.kill(workers[1].pid, signal.SIGKILL)
    for answer in begun:
        with raises(BackendError):
            answer.result(timeout=60)
    with raises(BackendError):
        engine.generate(UNEQUAL)
    assert not any(worker.is_alive() for worker in workers)
