"""Tensor-parallel sizes that a model does not divide by are refused from its config.json, for every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl_rl.models.divisions import tensor_parallel_problems
from recorded_messages import Raises

QWEN_0_5B = {
    **{"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14},
    **{"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
}
"""As its config.json on the hub has them."""
LLAMA_8B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False},
}


def policy_of(folder: Path, sizes: dict[str, Any], **options: Any) -> PolicyConfig:
    (folder / "config.json").write_text(json.dumps(sizes))
    return PolicyConfig(model_name=str(folder), **options)


@pytest.mark.parametrize(
    ("sizes", "ways", "copies", "message", "fix"),
    [
        (QWEN_0_5B, 4, True, "14 attention heads", "set it to 1 or 2"),  # 2 key-value heads have two copies each
        (QWEN_0_5B, 4, False, "14 attention heads and 2 key-value heads", "set it to 1 or 2"),
        (QWEN_0_5B, 7, True, "2 key-value heads and 4864 entries", "set it to 1 or 2"),  # 4864 = 7 * 694 + 6
        (LLAMA_8B, 16, False, "8 key-value heads", "set it to 1 or 2 or 4 or 8"),
    ],
)
def test_what_does_not_divide_is_named_with_what_does(
    tmp_path: Path, sizes: dict[str, Any], ways: int, copies: bool, message: str, fix: str
) -> None:
    policy = policy_of(tmp_path, sizes)
    (problem,) = tensor_parallel_problems(policy, ways, "where", copies_key_values=copies)
    assert message in problem.message
    assert (problem.path, problem.fix) == ("where", fix)


def test_what_divides_or_is_not_known_is_let_through(tmp_path: Path) -> None:
    assert list(tensor_parallel_problems(policy_of(tmp_path, LLAMA_8B), 16, "where")) == []
    policy = policy_of(tmp_path, QWEN_0_5B, hf_config_overrides={"num_attention_heads": 16, "num_key_value_heads": 4})
    assert list(tensor_parallel_problems(policy, 4, "where")) == []
    assert list(tensor_parallel_problems(policy_of(tmp_path, {"model_type": "rwkv"}), 4, "where")) == []
    assert list(tensor_parallel_problems(PolicyConfig(model_name="nobody/knows"), 4, "where")) == []


def test_a_width_that_no_layer_of_a_mixture_has_is_not_asked_about(tmp_path: Path) -> None:
    mixture = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert list(tensor_parallel_problems(policy_of(tmp_path, {**mixture, "intermediate_size": 14337}), 2, "x")) == []


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ({"policy": {"tensor_parallel_size": 4}}, "policy.tensor_parallel_size"),
        ({"policy": {"tensor_parallel_size": 4, "backend": "megatron"}}, "policy.tensor_parallel_size"),
        (
            {"generation": {"backend": {"name": "vllm", "tensor_parallel_size": 4}}},
            "generation.backend.tensor_parallel_size",
        ),
    ],
)
def test_every_backend_says_so_before_anything_loads(
    tmp_path: Path, backend: dict[str, Any], path: str, raises: Raises
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_0_5B))
    run = {"algorithm": "grpo", "model": str(tmp_path), "data": "arithmetic", "environment": "math"}
    with raises(ConfigError, 14, 4, path=path):
        load_config({**run, "cluster": {"gpus_per_node": 4}, **backend}, for_cluster=True)


def test_dtensor_splits_attention_of_a_mixture_together_with_its_experts(tmp_path: Path, raises: Raises) -> None:
    mixture = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    policy_of(tmp_path, mixture)
    policy = {"tensor_parallel_size": 2}
    data = {"algorithm": "sft", "model": str(tmp_path), "data": "arithmetic", "policy": policy}
    with raises(ConfigError, "policy.tensor_parallel_size", "experts", "backend.expert_parallel_size"):
        load_config({**data, "cluster": {"workers_per_node": 2}})
    divided = {**policy, "backend": {"name": "dtensor", "expert_parallel_size": 2}}
    load_config({**data, "policy": divided, "cluster": {"workers_per_node": 2}})
    load_config({**data, "policy": {}, "cluster": {"workers_per_node": 2}})
