"""The generation backend ``megatron`` on every architecture and in every layout, against ``hf`` and transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from megatron_generation import (
    LIVE_VERSION,
    REQUESTS,
    Generated,
    LiveCase,
    generate_empty_shard,
    generate_live,
    policy_of,
    write_model,
)
from nemorl.config import GenerationConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor import HFGenerationConfig
from nemorl_megatron import MegatronGenerationConfig
from nemorl_megatron.parallel import Sizes
from nemorl_testing.models import load_reference, response_logprobs
from spawned import run_calls
from test_megatron_models import COMMON, MIXTURES, MODELS, TP2, TP2_PP2
from tiers import in_full

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

DENSE = [model for model in MODELS if model not in MIXTURES]
ALSO_APART = ["one key-value head", "qwen2", "gemma2", "qwen3 moe", "qwen3 moe as chosen"]
"""Models that are divided in yet other ways: heads, windows, experts."""
LAYOUTS: dict[str, tuple[int, Sizes, list[str]]] = {
    "tp2": (
        2,
        TP2,
        [
            "llama",
            "gemma3",
            "mixtral",
            *in_full(ALSO_APART),
        ],
    ),
    "tp2, whole sequences": (2, Sizes(tensor=2), ["one key-value head", *in_full(["llama"])]),
    "pp2": (2, Sizes(pipeline=2), ["qwen2", "mixtral", *in_full(["llama", "gemma3"])]),
    "pp2 vpp2": (2, Sizes(pipeline=2, virtual_pipeline=2), ["gemma3", *in_full(["qwen2"])]),
    "tp2 etp2": (2, replace(TP2, expert_tensor=2), in_full(MIXTURES)),
    "dp2": (2, Sizes(), ["llama"]),
    "dp2 ep2": (2, Sizes(expert=2), ["qwen3 moe", *in_full(["qwen3 moe as chosen", "mixtral"])]),
    "tp2 pp2": (4, TP2_PP2, in_full(["gemma3", "one key-value head"])),
    "dp2 tp2 ep2": (4, replace(TP2, expert=2), in_full(["mixtral"])),
    "dp2 pp2 ep2": (4, Sizes(pipeline=2, expert=2), in_full(["qwen3 moe"])),
}
CASES = [(model, layout) for layout, (_, _, models) in LAYOUTS.items() for model in models]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: str(write_model(folder / name.replace(" ", "_"), architecture, {**COMMON, **sizes}))
        for name, (architecture, sizes) in MODELS.items()
    }


@pytest.fixture(scope="module")
def alone(models: Mapping[str, str]) -> dict[str, list[list[Completion]]]:
    """What one process says, by model."""
    return {name: _generate(MegatronGenerationConfig(), folder) for name, folder in models.items()}


@pytest.fixture(scope="module")
def live(models: Mapping[str, str]) -> dict[tuple[str, str], list[Generated]]:
    """What every rank says, by model and layout."""
    found: dict[tuple[str, str], list[Generated]] = {}
    for ranks in (2, 4):
        chosen = [(model, layout) for model, layout in CASES if LAYOUTS[layout][0] == ranks]
        cases = [
            LiveCase(models[model], LAYOUTS[layout][1], {"max_batch_rows": 4}, shards=layout.startswith("dp"))
            for model, layout in chosen
        ]
        found |= dict(zip(chosen, run_calls([(generate_live, (case,)) for case in cases], ranks), strict=True))
    return found


def _generate(config: Any, folder: str, weights: WeightHandle | None = None) -> list[list[Completion]]:
    engine = config.build(GenerationConfig(), policy_of(folder), WorkerContext(), weights)
    found: list[list[Completion]] = engine.generate(REQUESTS)
    engine.shutdown()
    return found


@cache
def _reference(folder: str) -> Any:
    return load_reference(folder)


def _furthest(found: list[list[Completion]], model: Any) -> float:
    """Largest difference between a log-prob and that which transformers computes from the whole sequence."""
    gaps = [
        abs(mine - theirs)
        for request, group in zip(REQUESTS, found, strict=True)
        for completion in group
        for mine, theirs in zip(
            completion.logprobs,
            response_logprobs(model, request.token_ids, completion.token_ids, request.sampling.temperature),
            strict=True,
        )
    ]
    return max(gaps)


def _tokens(found: list[list[Completion]]) -> list[tuple[int, ...]]:
    return [completion.token_ids for group in found for completion in group]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_hf_and_log_probs_those_of_transformers(
    name: str, models: Mapping[str, str], alone: Mapping[str, list[list[Completion]]]
) -> None:
    hf = _generate(HFGenerationConfig(), models[name])
    assert _tokens(alone[name]) == _tokens(hf)
    assert _furthest(alone[name], _reference(models[name])) < 1e-4


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_layout_over_a_live_model_says_what_one_process_says(
    name: str,
    layout: str,
    alone: Mapping[str, list[list[Completion]]],
    live: Mapping[tuple[str, str], list[Generated]],
) -> None:
    for found in live[name, layout]:
        expected = [alone[name][number] for number in found.requests]
        assert _tokens(found.completions) == _tokens(expected)
        for mine, theirs in zip(found.completions, expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                assert one.finish_reason == other.finish_reason
        assert found.is_as_before, "generation left the trainer's model changed"


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_trainer_that_changes_its_weights_in_place_is_heard_at_once(
    name: str, layout: str, live: Mapping[tuple[str, str], list[Generated]]
) -> None:
    for found in live[name, layout]:
        assert _tokens(found.after_update) != _tokens(found.completions[-1:])
        assert {c.weight_versions for group in found.after_update for c in group} == {(LIVE_VERSION,)}


def test_a_copy_without_requests_waits_for_nobody(models: Mapping[str, str]) -> None:
    ((first, second),) = run_calls([(generate_empty_shard, (models["llama"],))], 2)
    assert first == [len(request.seeds) for request in REQUESTS]
    assert second == []


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "qwen3 moe", "mixtral"])
def test_weights_may_come_in_any_buckets_and_by_the_names_of_a_model_in_memory(
    name: str, models: Mapping[str, str]
) -> None:
    model = load_reference(models[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)

    def export() -> Iterator[Mapping[str, torch.Tensor]]:
        # Mixtures hold the experts of a layer in two tensors here; files hold each by itself.
        for item in model.named_parameters():
            yield dict([item])

    found = _generate(MegatronGenerationConfig(), models[name], in_process_handle(export, 3))
    assert _furthest(found, model) < 1e-4
    assert {c.weight_version for group in found for c in group} == {3}
