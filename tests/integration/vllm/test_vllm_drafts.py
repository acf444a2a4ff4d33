"""Tokens guessed ahead by another model: the same distribution, seeds and log-probs, and weights that stay its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.metrics import values
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_testing.models import load_reference, tiny_model
from tiers import only
from vllm_engines import changed, gaps, handle_of, second_tokens, write_eagle_head

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = (9, 18, 10)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's model, somewhat changed."""
    folder = tmp_path_factory.mktemp("draft")
    changed(load_reference(tiny_model()), seed=7).save_pretrained(folder)
    return folder


def guessing(model: Path, method: str = "draft_model") -> dict[str, Any]:
    return {"speculative": {"method": method, "model": str(model), "num_speculative_tokens": 3}}


def requests(count: int = 2, **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_new_tokens": 24, **sampling})
    return [GenerationRequest(PROMPT, params, tuple(range(count)))]


@pytest.mark.parametrize("temperature", only(1.0, of=(1.0, 0.4)))
def test_the_draft_changes_neither_what_is_sampled_nor_its_logprobs(
    build: Any, draft: Path, temperature: float
) -> None:
    engine = build(tiny_model(), **guessing(draft))
    (group,) = engine.generate(requests(2000, temperature=temperature, max_new_tokens=2))
    rate = values(engine.take_metrics())["draft_acceptance_rate"]
    _, _, chi2, degrees = second_tokens(group, PROMPT, temperature)
    # Mean and standard deviation of chi-squared are k and sqrt(2 k).
    assert abs(chi2 - degrees) < 4 * (2 * degrees) ** 0.5
    assert 0.05 < rate < 0.95  # another model's guesses: some are taken, some are not

    state = torch.random.get_rng_state()
    mixed = [found for kind in (0.0, 0.7, 1.4) for found in requests(3, temperature=kind)]
    together = engine.generate(mixed)
    assert max(gaps(load_reference(tiny_model()), mixed, together)) < TOLERANCE
    for request, group in zip(mixed, together, strict=True):
        for seed, completion in zip(request.seeds, group, strict=True):
            ((alone,),) = engine.generate([GenerationRequest(PROMPT, request.sampling, (seed,))])
            assert alone.token_ids == completion.token_ids
    assert torch.random.get_rng_state().equal(state)  # the process's generator belongs to others


def test_a_policy_that_moves_away_from_its_draft_is_still_sampled_exactly(build: Any) -> None:
    model = load_reference(tiny_model())
    engine = build(tiny_model(), weights=handle_of(model, 0), **guessing(tiny_model()))
    asked = requests(16)
    assert max(gaps(model, asked, engine.generate(asked))) < TOLERANCE
    assert values(engine.take_metrics())["draft_acceptance_rate"] == 1.0  # the draft has the policy's own weights
    changed(model, seed=3)
    engine.update_weights(handle_of(model, 1), 1)
    assert max(gaps(model, asked, engine.generate(asked))) < TOLERANCE
    assert 0.05 < values(engine.take_metrics())["draft_acceptance_rate"] < 0.95

    # The draft's weights would come back with no update: they are never forgotten.
    held = engine.held_bytes()["weights"]
    engine.sleep(2)
    assert engine.held_bytes()["weights"] < held
    engine.wake(["weights", "cache"])
    changed(model, seed=4)
    engine.update_weights(handle_of(model, 2), 2)
    assert max(gaps(model, asked, engine.generate(asked))) < TOLERANCE
    assert values(engine.take_metrics())["draft_guessed_tokens"] > 0


def test_a_head_that_reads_the_policys_hidden_states_changes_no_logprob_over_updates(
    build: Any, tmp_path: Path
) -> None:
    target = tiny_model(num_key_value_heads=2, num_hidden_layers=8)  # of which the head reads the states at 2, 4 and 5
    model = load_reference(target)
    engine = build(target, handle_of(model, 0), **guessing(write_eagle_head(tmp_path, target), "eagle3"))
    asked = [found for kind in (0.0, 0.5, 1.0) for found in requests(6, temperature=kind)]
    for version in range(3):
        if version == 2:
            engine.sleep(2)
            engine.wake(["weights", "cache"])
        if version:
            changed(model, seed=version)
            engine.update_weights(handle_of(model, version), version)
        groups = engine.generate(asked)
        assert max(gaps(model, asked, groups)) < TOLERANCE
        found = values(engine.take_metrics())
        assert found["draft_guessed_tokens"] > 100
        assert 0.0 < found["draft_acceptance_rate"] < 0.5  # random weights are right now and then
    ((alone,),) = engine.generate([GenerationRequest(PROMPT, asked[2].sampling, (4,))])
    assert alone.token_ids == groups[2][4].token_ids
