"""What the engine refuses and how, and that it leaves the process as it was."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from nemorl.errors import BackendError, NemorlError
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_testing.models import load_reference, tiny_model
from recorded_messages import Raises
from vllm_engines import build_generator, gaps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = (9, 18, 10)
SAMPLED = SamplingParams(max_new_tokens=8)


@pytest.mark.parametrize(
    ("request_", "facts"),
    [
        (GenerationRequest((), SAMPLED), [1]),
        (GenerationRequest(PROMPT * 100, SAMPLED), [1, 300, "policy.max_sequence_tokens", 256]),
        (GenerationRequest((9, 5000), SAMPLED), [1, 9, 5000, 88]),
        (GenerationRequest((-1,), SAMPLED), [1, -1]),
        (GenerationRequest(PROMPT, replace(SAMPLED, max_new_tokens=0)), [1, 0]),
        (GenerationRequest(PROMPT, replace(SAMPLED, temperature=3.0)), [1, 3]),
        (GenerationRequest(PROMPT, replace(SAMPLED, temperature=0.001)), [1, "0.001"]),
    ],
)
def test_a_bad_request_is_named_and_harms_no_other(
    generator: Any, request_: GenerationRequest, facts: list[object], raises: Raises
) -> None:
    good = GenerationRequest(PROMPT, SAMPLED)
    with raises(BackendError, *facts):
        generator.generate([good, request_])
    assert len(generator.generate([good])[0][0].token_ids) > 0


def test_the_models_own_limit_is_respected(build: Any, raises: Raises) -> None:
    engine = build(tiny_model(), policy={"max_sequence_tokens": 100_000})
    with raises(BackendError, "max_position_embeddings", 1024):
        engine.generate([GenerationRequest(PROMPT * 400, SAMPLED)])


def test_more_prompt_tokens_than_one_step_takes_are_computed_in_turn(build: Any) -> None:
    engine = build(tiny_model(), policy={"max_sequence_tokens": 1000})
    # 4 prompts of 900 tokens: two steps of at most 2,048 tokens.
    requests = [
        GenerationRequest(tuple((place + row) % 80 + 8 for place in range(900)), SAMPLED, (row,)) for row in range(4)
    ]
    assert max(gaps(load_reference(tiny_model()), requests, engine.generate(requests))) < 1e-4


def test_too_little_memory_says_which_option_to_raise(raises: Raises) -> None:
    with raises(BackendError, "kv_cache_gib", varies="ValueError: .*"):
        build_generator(tiny_model(), kv_cache_gib=0.0001)


def test_an_unknown_engine_argument_is_named(raises: Raises) -> None:
    with raises(BackendError, "no_such_argument", "engine_args"):
        build_generator(tiny_model(), engine_args={"no_such_argument": 1})


def test_a_build_of_vllm_for_another_device_is_an_error(raises: Raises) -> None:
    from nemorl.config import PolicyConfig
    from nemorl_vllm.config import VLLMConfig
    from nemorl_vllm.generation import VLLMGeneration

    policy = PolicyConfig(model_name=str(tiny_model()), max_sequence_tokens=64)
    here = "cuda:0" if not torch.cuda.is_available() else "cpu"
    with raises(BackendError, here, varies=r"\b(cpu|cuda)\b"):
        VLLMGeneration(policy, WorkerContext(device=here), None, VLLMConfig())


def test_random_weights_need_a_trainer(raises: Raises) -> None:
    with raises(BackendError):
        build_generator(tiny_model(), policy={"init": "random"})


def test_a_model_that_is_not_there_is_named(tmp_path: Path, raises: Raises) -> None:
    (tmp_path / "config.json").write_text("{}")
    with raises(NemorlError):
        build_generator(tmp_path)


def test_building_and_generating_leaves_seeds_and_threads_of_the_process_alone(build: Any) -> None:
    def state() -> tuple[Any, ...]:
        return (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())

    before, set_threads, threads = state(), torch.set_num_threads, torch.get_num_threads()
    engine = build(tiny_model())
    assert state() == before
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads
    engine.generate([GenerationRequest(PROMPT, SAMPLED)])
    assert state() == before


def test_engines_of_one_process_do_not_disturb_each_other(build: Any, generator: Any) -> None:
    request = GenerationRequest(PROMPT, SAMPLED, (1, 2))
    wanted = [completion.token_ids for completion in generator.generate([request])[0]]
    other = build(tiny_model(seed=8))
    other.generate([request])
    other.shutdown()
    assert [completion.token_ids for completion in generator.generate([request])[0]] == wanted


def test_every_64_bit_seed_is_taken(generator: Any) -> None:
    seeds = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)
    found = generator.generate([GenerationRequest(PROMPT, SamplingParams(max_new_tokens=12), seeds)])[0]
    assert len({completion.token_ids for completion in found}) == len(seeds)


def test_a_response_of_more_tokens_ends_later_than_one_that_was_asked_for_with_it(generator: Any) -> None:
    requests = [GenerationRequest(PROMPT, SamplingParams(max_new_tokens=count, ignore_eos=True)) for count in (2, 40)]
    short, long = (group[0].span for group in generator.generate(requests))
    assert 0.0 == short.began_s < short.ended_s < long.ended_s
