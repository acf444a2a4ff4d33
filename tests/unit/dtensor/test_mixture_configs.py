"""What cannot be divided, or is no router's option, is said by the config, with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl_dtensor import DTensorConfig
from nemorl_rl.models.tiny import write_tiny_model

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
SIX: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
SHARED: dict[str, Any] = {"context_parallel_size": 2}
UNCUT: dict[str, Any] = {"expert_parallel_size": 2, "sequence_parallel": False}
EXPERTS, ROUTER = "backend.expert_parallel_size", "backend.router."


def problems(folder: Path | str, world: int, backend: dict[str, Any], **policy: Any) -> list[str]:
    """Paths of the options that are refused."""
    config = DTensorConfig(**backend)
    fields = PolicyConfig.model_validate(
        {"model_name": str(folder), "backend": {"name": "dtensor", **backend}, **policy}
    )
    found = [*config.rank_problems(fields, world)]
    assert all(issue.message and issue.fix for issue in found)
    return [issue.path for issue in found]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mixture"), architecture="qwen3_moe", **SIZES, **SIX)


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose routers return something else."""
    sizes = {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 2}
    return write_tiny_model(tmp_path_factory.mktemp("unknown"), architecture="granitemoe", **sizes)


@pytest.mark.parametrize(
    ("world", "backend", "policy", "expected"),
    [
        (4, {"expert_parallel_size": 2}, {}, []),
        (12, {"expert_parallel_size": 3, "data_parallel_replicas": 2}, {}, []),
        (4, {"expert_parallel_size": 4}, {}, [EXPERTS]),  # of six experts
        (4, {"expert_parallel_size": 3}, {}, [EXPERTS]),  # by four workers
        (6, {"expert_parallel_size": 2, "data_parallel_replicas": 6}, {}, [EXPERTS]),  # a worker each
        (1, {"expert_parallel_size": 2}, {}, [EXPERTS]),
        (4, {"expert_parallel_size": 2}, {"tensor_parallel_size": 2}, []),
        (2, {"expert_parallel_size": 2}, {"tensor_parallel_size": 2}, []),  # the same two workers
        (2, {}, {"tensor_parallel_size": 2}, ["tensor_parallel_size"]),  # whose experts would be held twice
        (2, UNCUT, {"tensor_parallel_size": 2}, ["backend.sequence_parallel"]),
        (4, {**SHARED, "expert_parallel_size": 2}, {"tensor_parallel_size": 2}, ["backend.context_parallel_size"]),
        (1, {"router": {"balance_loss": 0.1, "dtype": "float32"}}, {}, []),
        (4, {**SHARED, "expert_parallel_size": 2, "router": {"balance_loss": 0.1, "replay": True}}, {}, []),
        (2, {**SHARED, "expert_parallel_size": 2, "offload": {"parameters": True}}, {}, []),
        (3, SHARED, {}, ["backend.context_parallel_size"]),  # three workers, two by two
        (1, {"router": {"bias_update_rate": 0.1}}, {}, [ROUTER + "bias_update_rate"]),
    ],
)
def test_of_six_experts(
    world: int, backend: dict[str, Any], policy: dict[str, Any], expected: list[str], mixture: Path
) -> None:
    assert problems(mixture, world, backend, **policy) == expected


def test_a_dense_model_has_no_experts_and_no_routers(tmp_path: Path) -> None:
    dense = write_tiny_model(tmp_path, **SIZES)
    assert problems(dense, 2, {"expert_parallel_size": 2}) == [EXPERTS]
    assert problems(dense, 1, {"router": {"balance_loss": 0.1}}) == [ROUTER + "balance_loss"]


def test_routers_of_other_kinds_are_not_trained_otherwise(unknown: Path) -> None:
    assert problems(unknown, 1, {"router": {"balance_loss": 0.1}}) == [ROUTER + "balance_loss"]
    assert problems(unknown, 2, {"expert_parallel_size": 2}) == []
    split = problems(unknown, 2, {"expert_parallel_size": 2}, tensor_parallel_size=2)
    assert split == ["tensor_parallel_size"]


EXPERT_LORA: dict[str, Any] = {"rank": 2, "target_modules": ["q_proj", "experts.down_proj"]}


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({}, []),
        ({"dropout": 0.1}, ["lora.dropout"]),
        ({"dropout": 0.1, "target_modules": ["q_proj"]}, []),
        ({"base": "nf4"}, ["lora.base"]),
    ],
)
def test_adapters_of_experts(lora: dict[str, Any], expected: list[str], mixture: Path, unknown: Path) -> None:
    named = {**EXPERT_LORA, **lora}
    assert problems(mixture, 1, {}, lora=named) == expected
    of_experts = ["lora.target_modules"] if "experts.down_proj" in named["target_modules"] else []
    assert problems(unknown, 1, {}, lora=named) == [*expected, *of_experts]


def test_the_base_of_adapters_stays_as_it_is() -> None:
    folder = "nobody/knows"  # whose config.json is not here
    backend = {"router": {"bias_update_rate": 0.1}}
    assert problems(folder, 1, backend, lora={"rank": 2}) == [ROUTER + "bias_update_rate"]
    assert problems(folder, 1, backend) == []
