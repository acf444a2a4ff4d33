"""Log-probs are those of softmax(logits / temperature) over the whole vocabulary, whatever else the sampler does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_dtensor.model import load_model
from nemorl_tensors.filtering import TokenFilter
from nemorl_testing.models import load_reference, tiny_model
from vllm_engines import gaps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = ((9, 18, 10), (11, 12, 13, 14, 15, 16, 17, 40), (30,))
SAMPLED = SamplingParams(max_new_tokens=24)
TOLERANCE = 1e-4
"""Nats, float32."""


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 5}])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5, 0.0])
def test_logprobs_are_scaled_and_not_truncated(generator: Any, temperature: float, truncation: dict[str, Any]) -> None:
    params = replace(SAMPLED, temperature=temperature, **truncation)
    requests = [GenerationRequest(ids, params, (1, 2, 3)) for ids in PROMPTS]
    assert max(gaps(load_reference(tiny_model()), requests, generator.generate(requests))) < TOLERANCE


def test_greedy_and_sampled_requests_of_one_batch_have_their_own_temperatures(generator: Any) -> None:
    requests = [
        GenerationRequest(PROMPTS[0], replace(SAMPLED, temperature=temperature), (4, 5))
        for temperature in (0.0, 0.3, 1.0, 2.0)
    ]
    assert max(gaps(load_reference(tiny_model()), requests, generator.generate(requests))) < TOLERANCE


def test_a_cached_prefix_changes_nothing(generator: Any) -> None:
    # Longer than a block of the cache (128 tokens on the CPU), so that the second call finds it.
    request = GenerationRequest(tuple(range(8, 88)) * 2, SAMPLED, (1, 2))
    first, again = (generator.generate([request])[0] for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert max(gaps(load_reference(tiny_model()), [request], [again])) < TOLERANCE


@pytest.mark.parametrize("truncation", [{"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.9, "top_k": 5}])
def test_a_request_may_ask_for_logprobs_of_what_was_kept(generator: Any, truncation: dict[str, Any]) -> None:
    model, keep = load_reference(tiny_model()), TokenFilter(truncation.get("top_k"), truncation.get("top_p", 1.0))
    plain = replace(SAMPLED, temperature=0.8, **truncation)
    kinds = (plain, replace(plain, filtered_logprobs=True), replace(plain, temperature=0.0, filtered_logprobs=True))
    groups = generator.generate([GenerationRequest(PROMPTS[1], kind, (1, 2)) for kind in kinds])
    assert [c.token_ids for c in groups[0]] == [c.token_ids for c in groups[1]]
    for group, temperature, asked in zip(groups, (0.8, 0.8, 1.0), (False, True, False), strict=True):
        completion = group[0]
        ids = torch.tensor([*PROMPTS[1], *completion.token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(PROMPTS[1]) - 1 : -1].float() / temperature
        whole = torch.log_softmax(keep.applied(logits) if asked else logits, -1)
        wanted = whole.gather(1, ids[len(PROMPTS[1]) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=TOLERANCE, rtol=0)


def test_overrides_of_the_models_config_reach_the_engine(build: Any) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    overrides = {"rope_scaling": scaling, "max_position_embeddings": 256}
    requests = [GenerationRequest(ids, SAMPLED, (1, 2)) for ids in PROMPTS]
    policy = PolicyConfig(model_name=str(tiny_model()), hf_config_overrides=overrides)
    yarn = load_model(policy)
    groups = build(tiny_model(), policy={"hf_config_overrides": overrides}).generate(requests)
    assert max(gaps(yarn, requests, groups)) < TOLERANCE
    assert max(gaps(load_reference(tiny_model()), requests, groups)) > 10 * TOLERANCE


@pytest.mark.full
def test_bfloat16_stays_close_to_float32(build: Any) -> None:
    # bfloat16 has 8 bits: log-probs of a few nats differ by some hundredths.
    requests = [GenerationRequest(ids, SAMPLED, (1, 2)) for ids in PROMPTS]
    engine = build(tiny_model(), policy={"precision": "bfloat16"})
    found = gaps(load_reference(tiny_model()), requests, engine.generate(requests))
    assert 0 < sum(found) / len(found) < 0.05
