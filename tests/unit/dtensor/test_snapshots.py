"""Several versions of the weights in the backend ``hf``: memory, sleep, conversations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor import HFGenerationConfig
from nemorl_dtensor.generation import HFGeneration
from nemorl_dtensor.model import load_model
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_rl.planning.memory.engines import Engines, rows_memory
from nemorl_rl.serving.snapshots import VersionNotHeldError
from nemorl_testing.models import response_logprobs
from recorded_messages import Raises

PROMPT = (9, 18, 10)
SAMPLED = SamplingParams(max_new_tokens=12, ignore_eos=True)


def handle(model: Any, version: int) -> WeightHandle:
    return in_process_handle(lambda: iter([dict(model.named_parameters())]), version)


def engine(policy: PolicyConfig, models: list[Any], snapshots: int) -> HFGeneration:
    """One that was given the weights of each model in turn, as versions 0, 1, …"""
    options = HFGenerationConfig(snapshots=snapshots)
    found = HFGeneration(GenerationConfig(), policy, WorkerContext(), handle(models[0], 0), options)
    for version, model in enumerate(models[1:], 1):
        found.update_weights(handle(model, version), version)
    return found


@pytest.fixture
def policy(tmp_path: Path) -> PolicyConfig:
    write_tiny_model(tmp_path, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    return PolicyConfig(model_name=str(tmp_path), init="random", max_sequence_tokens=128)


@pytest.fixture
def models(policy: PolicyConfig) -> list[Any]:
    return [load_model(policy, seed=seed) for seed in range(4)]


def expect_drawn_from(model: Any, completion: Completion, prompt: tuple[int, ...] = PROMPT) -> None:
    wanted = response_logprobs(model, prompt, completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), torch.tensor(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("snapshots", [1, 2, 3])
def test_memory_is_what_the_plan_says_for_so_many_versions(
    policy: PolicyConfig, models: list[Any], snapshots: int
) -> None:
    generator = engine(policy, models, snapshots)
    geometry = Geometry.from_config(json.loads(Path(policy.model_name, "config.json").read_text()))
    options = HFGenerationConfig(snapshots=snapshots)
    planned = Engines(options, geometry, element=4, replicas=1, width=128, shares_weights=snapshots == 1)
    parameters = sum(parameter.numel() for parameter in models[0].parameters())
    # One version is the trainer's own memory; several are copies, 4 bytes each parameter.
    expected = 0 if snapshots == 1 else snapshots * 4 * parameters
    assert generator.held_bytes()["weights"] == planned.weights.size == expected
    assert rows_memory(planned, 1000, max_rows=8, kv_tokens=10**6).passing[0].size == (
        planned.token_bytes * snapshots * 8 * 128
    )


def test_all_versions_sleep_and_wake(policy: PolicyConfig, models: list[Any]) -> None:
    generator = engine(policy, models, 3)
    requests = [GenerationRequest(PROMPT, SAMPLED, version=version) for version in (1, 2, 3)]
    before = generator.generate(requests)
    generator.sleep(1)
    assert not any(generator.held_bytes().values())
    generator.wake(["weights", "cache"])
    assert generator.generate(requests) == before
    for model, [completion] in zip(models[1:], before, strict=True):
        expect_drawn_from(model, completion)


def test_the_second_level_of_sleep_leaves_the_newest(policy: PolicyConfig, models: list[Any]) -> None:
    generator = engine(policy, models[:2], 2)
    generator.sleep(2)
    generator.wake(["weights"])
    generator.update_weights(handle(models[2], 2), 2)
    generator.update_weights(handle(models[3], 3), 3)
    for version in (2, 3):
        [[completion]] = generator.generate([GenerationRequest(PROMPT, SAMPLED, version=version)])
        expect_drawn_from(models[version], completion)
    with pytest.raises(VersionNotHeldError):
        generator.generate([GenerationRequest(PROMPT, SAMPLED, version=1)])


def test_weights_that_come_again_under_their_number_take_their_own_place(
    policy: PolicyConfig, models: list[Any]
) -> None:
    generator = engine(policy, models[:2], 2)
    generator.update_weights(handle(models[2], 1), 1)
    for version, model in ((0, models[0]), (1, models[2])):
        [[completion]] = generator.generate([GenerationRequest(PROMPT, SAMPLED, version=version)])
        expect_drawn_from(model, completion)


def test_a_conversation_goes_on_with_the_version_that_it_names(policy: PolicyConfig, models: list[Any]) -> None:
    generator = engine(policy, models[:1], 2)
    [[said]] = generator.generate([GenerationRequest(PROMPT, SAMPLED, goes_on=True, version=0)])
    generator.update_weights(handle(models[1], 1), 1)
    turn = (*PROMPT, *said.token_ids, 11, 12)
    for version in (0, 1):
        [[completion]] = generator.generate([GenerationRequest(turn, SAMPLED, goes_on=True, version=version)])
        expect_drawn_from(models[version], completion, turn)


def test_one_version_alone_may_be_named_too(policy: PolicyConfig, models: list[Any], raises: Raises) -> None:
    generator = engine(policy, models[:2], 1)
    [[completion]] = generator.generate([GenerationRequest(PROMPT, SAMPLED, version=1)])
    expect_drawn_from(models[1], completion)
    with raises(VersionNotHeldError):
        generator.generate([GenerationRequest(PROMPT, SAMPLED, version=0)])


def test_an_engine_that_holds_several_versions_shares_no_memory_with_its_trainer(policy: PolicyConfig) -> None:
    shares = [
        RolloutRunConfig(policy=policy, generation={"backend": {"name": "hf", "snapshots": count}, "max_new_tokens": 8})
        .place()
        .shares_weights
        for count in (1, 2)
    ]
    assert shares == [True, False]
