"""What a ``config.json`` shows is refused when the config loads: the same as when the model is built."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl.config import PolicyConfig, load_config
from nemorl.errors import BackendError, ConfigError
from nemorl_megatron import MegatronConfig
from nemorl_megatron.model import _require_divisible
from nemorl_megatron.parallel import Sizes
from nemorl_megatron.settings import settings_of
from recorded_messages import Raises
from transformers import AutoConfig

pytestmark = pytest.mark.megatron


def _model(chance: random.Random, folder: Path) -> dict[str, Any]:
    """``config.json`` of a dense model or a mixture of small, odd sizes."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": chance.choice([2, 3, 4, 6, 8]),
        "num_attention_heads": 4,
        "num_key_value_heads": chance.choice([1, 2, 4]),
        "hidden_size": 32,
        "head_dim": 8,
        "intermediate_size": chance.choice([48, 64, 66]),
        "vocab_size": 512,
    }
    kind = chance.choice(["llama", "qwen3_moe"])
    if kind == "qwen3_moe":
        width = chance.choice([12, 16, 18])
        sizes |= {"num_experts": chance.choice([4, 6, 8]), "num_experts_per_tok": 2, "moe_intermediate_size": width}
    stored = AutoConfig.for_model(kind, **sizes).to_dict()
    (folder / "config.json").write_text(json.dumps(stored))
    return stored


def test_a_config_is_refused_exactly_where_its_model_could_not_be_divided(tmp_path: Path) -> None:
    chance, outcomes = random.Random(17), {True: 0, False: 0}
    for number in range(300):
        (folder := tmp_path / str(number)).mkdir()
        stored = _model(chance, folder)
        stages = chance.choice([1, 1, 2, 3])
        backend = MegatronConfig(
            pipeline_parallel_size=stages,
            virtual_pipeline_parallel_size=chance.choice([None, 2]) if stages > 1 else None,
            expert_parallel_size=chance.choice([1, 1, 2, 4]),
            expert_tensor_parallel_size=chance.choice([1, 1, 1, 4]),
            sequence_parallel=chance.random() < 0.8,
        )
        policy = PolicyConfig(model_name=str(folder), tensor_parallel_size=chance.choice([1, 1, 2, 4]), backend=backend)
        settings = settings_of(AutoConfig.for_model(**stored))
        try:
            _require_divisible(settings, Sizes.of(policy, backend))
            divides = True
        except BackendError:
            divides = False
        world = 4 * 4 * stages * policy.tensor_parallel_size
        found = [*backend.rank_problems(policy, world)]
        assert (not found) is divides, (found, policy, stored)
        outcomes[divides] += 1
    assert min(outcomes.values()) > 50, "both happen often"


@pytest.mark.parametrize(
    ("sizes", "backend", "path"),
    [
        ({"num_hidden_layers": 3}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({}, {"expert_parallel_size": 2}, "expert_parallel_size"),
    ],
)
def test_the_config_says_what_does_not_divide(
    sizes: dict[str, int], backend: dict[str, int], path: str, tmp_path: Path, raises: Raises
) -> None:
    AutoConfig.for_model("llama", **{"num_hidden_layers": 4, **sizes}).save_pretrained(tmp_path)
    data = {
        "algorithm": "sft",
        "model": str(tmp_path),
        "data": "arithmetic",
        "policy": {"backend": {"name": "megatron", **backend}},
        "cluster": {"workers_per_node": 2},
    }
    with raises(ConfigError, f"policy.backend.{path}"):
        load_config(data)
