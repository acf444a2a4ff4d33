"""Tokens guessed ahead by n-grams: the same distribution, exact log-probs, and counts of what was accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import BackendError
from nemorl.metrics import values
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig
from nemorl_testing.models import greedy_continuation, load_reference, tiny_model
from recorded_messages import Raises
from tiers import only
from vllm_engines import VOCABULARY, changed, gaps, handle_of, second_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NGRAM = {"speculative": {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}}
TOLERANCE = 1e-4
EVERYTHING = (*range(VOCABULARY), *range(VOCABULARY))
"""After any token there is something to guess: the next number."""


@pytest.fixture
def engine(build: Any) -> Any:
    return build(tiny_model(), **NGRAM)


def requests(count: int = 2, prompt: tuple[int, ...] = EVERYTHING, **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_new_tokens": 24, **sampling})
    return [GenerationRequest(prompt, params, tuple(range(count)))]


@pytest.mark.full
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, id="plain"),
        pytest.param({"temperature": 0.5}, id="cold"),
        pytest.param({"temperature": 1.5, "top_p": 0.8}, id="top-p"),
        pytest.param({"temperature": 0.0}, id="greedy"),
        pytest.param({"top_k": 5}, id="top-k"),
        pytest.param({"prompt_logprobs": True}, id="prompt"),
    ],
)
def test_logprobs_are_the_trainers_before_and_after_an_update(engine: Any, sampling: dict[str, Any]) -> None:
    model = load_reference(tiny_model())
    asked = requests(8, **sampling)
    assert max(gaps(model, asked, engine.generate(asked))) < TOLERANCE
    guessed = values(engine.take_metrics())
    assert guessed["draft_acceptance_length"] >= 1
    changed(model, seed=3)
    engine.update_weights(handle_of(model, 1), 1)
    assert max(gaps(model, asked, engine.generate(asked))) < TOLERANCE


@pytest.mark.full
def test_requests_of_different_temperatures_share_a_batch(engine: Any) -> None:
    asked = [found for kind in (0.0, 0.7, 1.4) for found in requests(3, temperature=kind)]
    assert max(gaps(load_reference(tiny_model()), asked, engine.generate(asked))) < TOLERANCE


@pytest.mark.full
def test_a_seed_gives_the_same_tokens_alone_and_among_others(engine: Any) -> None:
    state = torch.random.get_rng_state()
    (together,) = engine.generate(requests(6))
    alone = [
        engine.generate([GenerationRequest(EVERYTHING, requests()[0].sampling, (seed,))])[0][0] for seed in range(6)
    ]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert torch.random.get_rng_state().equal(state)  # the process's generator belongs to others


@pytest.mark.full
def test_greedy_tokens_are_those_of_an_engine_that_does_not_guess(engine: Any, build: Any) -> None:
    plain = build(tiny_model())
    prompts = [(9, 18, 10), (5, 6, 7) * 5, EVERYTHING]
    asked = [found for prompt in prompts for found in requests(1, prompt, temperature=0.0, max_new_tokens=48)]
    engine.take_metrics()
    answers = [[c.token_ids for (c,) in found.generate(asked)] for found in (engine, plain)]
    assert answers[0] == answers[1]
    found = values(engine.take_metrics())
    assert found["draft_acceptance_rate"] > 0.1  # greedy responses of a tiny model repeat themselves
    # With every guess one more token than was accepted of it: 1 + 3 * rate where all guesses have three tokens.
    assert 1 < found["draft_acceptance_length"] <= 1 + 3 * found["draft_acceptance_rate"] + 1e-9
    assert values(engine.take_metrics()) == {"draft_guessed_tokens": 0.0}
    assert plain.take_metrics() == {}


def test_what_repeats_is_guessed_and_what_is_sampled_is_the_models(build: Any) -> None:
    model, engine = load_reference(tiny_model()), build(tiny_model(), speculative={})
    stop = frozenset({model.generation_config.eos_token_id})
    repetitive = [(5, 6, 7) * 5, (40, 41) * 8, EVERYTHING]
    greedy = [found for prompt in repetitive for found in requests(1, prompt, temperature=0.0, max_new_tokens=48)]
    answers = engine.generate(greedy)
    assert max(gaps(model, greedy, answers)) < TOLERANCE
    for request, (completion,) in zip(greedy, answers, strict=True):
        assert completion.token_ids == greedy_continuation(model, request.token_ids, 48, stop)
    found = values(engine.take_metrics())
    assert found["draft_guessed_tokens"] >= 48
    assert found["draft_acceptance_rate"] > 0.1
    assert found["draft_acceptance_length"] > 1


def test_where_nothing_was_guessed_nothing_is_said_of_what_was_accepted(build: Any) -> None:
    engine = build(tiny_model(), speculative={})
    engine.generate(requests(2, (9, 18, 10), max_new_tokens=2))  # no two of its tokens have stood together before
    assert values(engine.take_metrics()) == {"draft_guessed_tokens": 0.0}


@pytest.mark.parametrize("temperature", only(1.0, of=(1.0, 0.4)))
def test_guessing_does_not_change_what_is_sampled(engine: Any, temperature: float) -> None:
    engine.take_metrics()
    (group,) = engine.generate(requests(2000, temperature=temperature, max_new_tokens=2))
    rate = values(engine.take_metrics())["draft_acceptance_rate"]
    expected, common, chi2, degrees = second_tokens(group, EVERYTHING, temperature)
    # Mean and standard deviation of chi-squared are k and sqrt(2 k). Guesses always accepted would be far beyond.
    assert abs(chi2 - degrees) < 4 * (2 * degrees) ** 0.5
    always = torch.bincount((torch.tensor([c.token_ids[0] for c in group]) + 1) % VOCABULARY, minlength=VOCABULARY)
    assert float(((always[common] - expected[common]) ** 2 / expected[common]).sum()) > 30 * degrees
    assert 0 < rate < 1


@pytest.mark.parametrize("sampling", [{"min_p": 0.1}, {"filtered_logprobs": True, "top_k": 5}])
def test_what_cannot_be_guessed_exactly_is_refused(engine: Any, sampling: dict[str, Any], raises: Raises) -> None:
    with raises(BackendError, "generation.backend.speculative", next(iter(sampling))):
        engine.generate(requests(**sampling))


@pytest.mark.full
def test_a_run_logs_what_was_accepted(tmp_path: Path) -> None:
    config = GRPOConfig(
        **{
            "model": str(tiny_model()),
            "run_dir": str(tmp_path / "run"),
            "policy": {"optimizer": {"lr": 1e-3}, "max_sequence_tokens": 64},
            "generation": {"backend": {"name": "vllm", "kv_cache_gib": 0.1, **NGRAM}, "max_new_tokens": 16},
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0, "export": False},
            "max_steps": 2,
        }
    )
    rows = [{"prompt": "abcabcabc", "answer": "1"}, {"prompt": "1+1=2 1+1=", "answer": "2"}]
    config.build().fit(rows, lambda prompt, response: float(len(set(response))), console=Console(quiet=True))
    steps = [record for record in read_jsonl(tmp_path / "run/metrics.jsonl") if "train/grad_norm" in record]
    assert len(steps) == 2
    for step in steps:
        assert 0 <= step["train/draft_acceptance_rate"] <= 1
        assert step["train/draft_acceptance_length"] >= 1
        assert step["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
