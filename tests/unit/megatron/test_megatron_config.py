"""What the config says of ranks, and what it refuses, where neither torch nor megatron-core is loaded."""

from __future__ import annotations

from typing import Any

import nemorl
import pytest
from nemorl.config import PolicyConfig
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl_grpo import GRPOConfig
from nemorl_megatron import MegatronConfig
from recorded_messages import Raises

RAY = {"launcher": "ray", "workers_per_node": 4}


def test_ranks_of_one_stage_are_neighbours_and_those_of_one_copy_are_not() -> None:
    # 8 ranks, tensor 2, pipeline 2, hence 2 copies. Stage 0 is ranks 0-3: copies 0 0 1 1; stage 1 is ranks 4-7.
    config, policy = MegatronConfig(pipeline_parallel_size=2), PolicyConfig(tensor_parallel_size=2)
    assert config.ranks_per_copy(policy) == 4
    assert config.data_shards(policy, 8) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert MegatronConfig().data_shards(policy, 4) == (0, 0, 1, 1)


def load(backend: dict[str, Any], policy: dict[str, Any], **more: Any) -> None:
    chosen = {"backend": {"name": "megatron", **backend}, **policy}
    load_config({"algorithm": "grpo", "model": "Qwen/Qwen2.5-0.5B", "policy": chosen, "cluster": RAY, **more})


@pytest.mark.parametrize(
    ("backend", "policy", "path", "facts"),
    [
        ({"virtual_pipeline_parallel_size": 2}, {}, "policy.backend.virtual_pipeline_parallel_size", []),
        ({"pipeline_parallel_size": 3}, {}, "policy.tensor_parallel_size", [3, 4]),
        ({"pipeline_parallel_size": 2}, {"tensor_parallel_size": 4}, "policy.tensor_parallel_size", [8, 4]),
        ({"expert_parallel_size": 3}, {}, "policy.backend.expert_parallel_size", [4]),
        ({"expert_parallel_size": 2, "expert_tensor_parallel_size": 4}, {}, "policy.backend.expert_parallel_size", [4]),
        (
            {"sequence_parallel": False},
            {"lora": {"rank": 4, "dropout": 0.1}, "tensor_parallel_size": 2},
            "policy.lora.dropout",
            [],
        ),
        ({"expert_paralel_size": 2}, {}, "policy.backend.expert_paralel_size", ["expert_parallel_size"]),
        (
            {},
            {"hf_config_overrides": {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}},
            "policy.hf_config_overrides.rope_scaling",
            ["'longrope'"],
        ),
        ({"layers_in_first_stage": 3}, {}, "policy.backend.layers_in_first_stage", ["pipeline_parallel_size"]),
        ({"head_counts_as_layer": True}, {}, "policy.backend.head_counts_as_layer", ["pipeline_parallel_size"]),
        (
            {"pipeline_parallel_size": 2, "layers_in_last_stage": 3, "head_counts_as_layer": True},
            {},
            "policy.backend.head_counts_as_layer",
            ["layers_in_last_stage"],
        ),
    ],
)
def test_what_cannot_be_is_refused_when_the_config_loads(
    backend: dict[str, Any], policy: dict[str, Any], path: str, facts: list[object], raises: Raises
) -> None:
    with raises(ConfigError, *facts, path=path):
        load(backend, policy)


def test_other_overrides_of_the_models_config_pass() -> None:
    load({}, {"hf_config_overrides": {"rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": True}})


@pytest.mark.parametrize(
    ("backend", "generation", "path"),
    [
        ({"context_parallel_size": 2}, {}, "policy.backend.context_parallel_size"),
        ({"attention": "transformer_engine"}, {}, "policy.backend.attention"),
        ({}, {"engine": "megatron_core"}, "generation.backend.engine"),
    ],
)
def test_what_a_generator_in_the_trainers_processes_cannot_is_refused_when_the_config_loads(
    backend: dict[str, Any], generation: dict[str, Any], path: str, raises: Raises
) -> None:
    chosen = {"backend": {"name": "megatron", **generation}}
    with raises(ConfigError, path=path):
        load(backend, {}, generation=chosen)
    if backend:  # apart from the trainer it has a model of its own
        load(backend, {}, generation=chosen, cluster={**RAY, "colocated": False, "generation_workers": 2})


def test_sizes_that_divide_are_accepted() -> None:
    load({"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, {"tensor_parallel_size": 2})
    load({"expert_parallel_size": 4}, {})


class Agent(nemorl.Environment):
    async def rollout(self, prompt: Any, policy: Any) -> float:
        return 1.0


@pytest.mark.parametrize(("colocated", "refused"), [(True, True), (False, False)])
def test_agents_are_refused_where_the_generator_lives_with_its_trainer(colocated: bool, refused: bool) -> None:
    apart = {} if colocated else {"workers_per_node": 2, "colocated": False}
    trainer: Any = GRPOConfig(
        model="Qwen/Qwen2.5-0.5B",
        policy={"backend": "megatron"},
        generation={"backend": "megatron"},
        cluster=apart,
    ).build()
    trainer.environment = Agent()
    found = [*trainer._driving_problems()]
    assert [problem.path for problem in found] == ["generation.backend"] * refused
    assert all("in the trainer's processes" in problem.message for problem in found)
