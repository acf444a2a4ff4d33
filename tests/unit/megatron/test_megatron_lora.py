"""Which layers get adapters over megatron-core, where their rows stand in parameters, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl.config import PolicyConfig
from nemorl.config.models import LoraConfig
from nemorl.errors import BackendError, UsageError
from nemorl.resources.worker import WorkerContext
from nemorl_megatron import MegatronConfig
from nemorl_megatron.bridge.exchange import Exchange
from nemorl_megatron.bridge.tables import weights
from nemorl_megatron.lora import RandomAdapters, _order, _require_whole_heads, _targets
from nemorl_megatron.parallel import Place, Sizes
from nemorl_megatron.settings import Settings, settings_of
from nemorl_testing.models import tiny_model
from recorded_messages import Raises
from transformers import AutoConfig

pytestmark = pytest.mark.megatron

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 8, "intermediate_size": 6}


def settings(architecture: str = "llama", **sizes: Any) -> Settings:
    return settings_of(AutoConfig.for_model(architecture, **{**HEADS, "num_hidden_layers": 1, **sizes}))


def on_rank(model: Settings, tensor: int, ranks: int) -> Exchange:
    place = Place(rank=tensor, tensor=tensor, pipeline=0, context=0, data=0, expert=0, expert_tensor=0)
    parallel: Any = SimpleNamespace(sizes=Sizes(tensor=ranks), place=place, device="cpu")
    return Exchange(model, parallel)


def test_rows_of_queries_keys_and_values_are_put_where_the_parameter_has_them() -> None:
    # Heads of 2 rows: queries q0..q3 are rows 0-7, keys k0 k1 rows 8-11, values v0 v1 rows 12-15. The parameter has
    # q0 q1 k0 v0 | q2 q3 k1 v1. A rank of two has q0 q1 = rows 0-3 of 4, k0 = 4-5, v0 = 6-7 of what it holds.
    model = settings()
    qkv = next(weight for weight in weights(model) if weight.rule == "qkv")
    assert _order(qkv, on_rank(model, 0, 1)).tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    for rank in (0, 1):
        assert _order(qkv, on_rank(model, rank, 2)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_rows_of_gate_and_up_stay_in_their_order() -> None:
    model = settings()
    gate_up = next(weight for weight in weights(model) if weight.rule == "gate_up")
    assert _order(gate_up, on_rank(model, 1, 2)).tolist() == [0, 1, 2, 3, 4, 5]


def test_targets_are_named_by_the_end_of_a_layers_name() -> None:
    found = _targets(settings(), LoraConfig(target_modules=("q_proj", "mlp.up_proj", "o_proj")))
    chosen = {target.module.rpartition(".")[2]: target.chosen for target in found}
    assert chosen == {"linear_qkv": (True, False, False), "linear_proj": (True,), "linear_fc1": (False, True)}
    factors = [factor for target in found for factor in target.factors(3)]
    described = [(factor.parameter.rpartition(".adapter.")[2], factor.rule, factor.shapes) for factor in factors]
    assert described[:4] == [
        ("q_proj.lora_A", "whole", ((3, 8),)),
        ("q_proj.lora_B", "vocabulary", ((8, 3),)),  # by rows
        ("o_proj.lora_A", "row", ((3, 8),)),  # by columns
        ("o_proj.lora_B", "whole", ((8, 3),)),
    ]


@pytest.mark.parametrize("name", ["lm_head", "q_porj", "router"])
def test_what_cannot_be_adapted_is_named(name: str, raises: Raises) -> None:
    with raises(BackendError, name, "q_proj"):
        _targets(settings(), LoraConfig(target_modules=("k_proj", name)))


def test_of_a_mixture_attention_is_adapted_unless_other_layers_are_named(raises: Raises) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "num_hidden_layers": 2}
    mixture = settings("qwen3_moe", **sizes, mlp_only_layers=[0])
    found = _targets(mixture, LoraConfig())
    assert {target.module.rpartition(".")[2] for target in found} == {"linear_qkv", "linear_proj"}
    assert all(all(target.chosen) for target in found)
    dense = _targets(mixture, LoraConfig(target_modules=("up_proj",)))
    assert [target.module for target in dense] == ["decoder.layers.0.mlp.linear_fc1"]
    with raises(BackendError, "w1", "experts"):
        _targets(settings("mixtral", num_local_experts=4), LoraConfig(target_modules=("q_proj", "w1")))


def test_ranks_that_share_a_key_value_head_are_refused(raises: Raises) -> None:
    model = settings()
    parallel: Any = SimpleNamespace(sizes=Sizes(tensor=4))
    with raises(BackendError, 2, 4):
        _require_whole_heads(model, parallel, _targets(model, LoraConfig()))
    _require_whole_heads(model, parallel, _targets(model, LoraConfig(target_modules=("o_proj", "up_proj"))))


def test_first_values_follow_from_name_and_seed_alone() -> None:
    table = [factor for target in _targets(settings(), LoraConfig()) for factor in target.factors(4)]
    one, again, other = (RandomAdapters(list(reversed(table)) if seed else table, seed) for seed in (0, 0, 1))
    for factor in table:
        (name,) = factor.stored
        drawn = one.read(name, ())
        assert torch.equal(drawn, again.read(name, ()))
        if name.endswith("lora_B.weight"):
            assert not drawn.any()
        else:
            assert float(drawn.abs().max()) <= factor.shapes[0][1] ** -0.5  # peft: uniform within 1 / sqrt(inputs)
            assert not torch.equal(drawn, other.read(name, ()))


def test_a_policy_without_adapters_has_none_to_export(tmp_path: Path, raises: Raises) -> None:
    backend: Any = MegatronConfig().build(PolicyConfig(model_name=str(tiny_model())), WorkerContext(), reference=False)
    with raises(UsageError, "adapters"):
        backend.save_adapters(tmp_path)
    backend.shutdown()
