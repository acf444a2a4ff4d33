"""Adapters of snapshots, as an engine takes them that was built for one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nemorl.config.models import GenerationConfig, LoraConfig
from nemorl.contracts import AdapterShape
from nemorl.errors import DataError, UsageError
from nemorl_agents.tinker.adapter_files import FACTORS, AdapterFiles, adapted_modules
from nemorl_agents.tinker.snapshots import snapshot_form
from recorded_messages import Raises
from safetensors.torch import save_file

LAYER = "base_model.model.model.layers.0.mlp.up_proj"
BASE = {f"{LAYER}.lora_A.weight": torch.zeros(2, 2), f"{LAYER}.lora_B.weight": torch.zeros(2, 2)}
FILES = AdapterFiles(LoraConfig(rank=2, alpha=32.0), BASE)


def test_an_adapter_of_a_smaller_rank_adds_the_same_to_its_layer(tmp_path: Path) -> None:
    """By itself 32 / 1 * [3, 4]^T [1, 2] = [[96, 192], [128, 256]]; the engine multiplies by 32 / 2."""
    factors = {
        f"{LAYER}.lora_A.weight": torch.tensor([[1.0, 2.0]]),
        f"{LAYER}.lora_B.weight": torch.tensor([[3.0], [4.0]]),
    }
    save_file(factors, tmp_path / FACTORS)
    handle = FILES.handle(tmp_path, AdapterShape(rank=1, alpha=32.0), 7)
    (found,) = handle.buckets()
    a_RI, b_OR = found[f"{LAYER}.lora_A.weight"], found[f"{LAYER}.lora_B.weight"]
    assert a_RI.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert b_OR.tolist() == [[6.0, 0.0], [8.0, 0.0]]
    assert (16 * b_OR @ a_RI).tolist() == [[96.0, 192.0], [128.0, 256.0]]
    assert (handle.form, handle.version) == ("adapters", 7)


def test_the_base_is_an_adapter_that_adds_nothing() -> None:
    (found,) = FILES.base_handle(3).buckets()
    assert found.keys() == BASE.keys()
    assert not any(factor.any() for factor in found.values())
    assert adapted_modules(found) == ("up_proj",)


def test_files_that_are_gone_are_the_clients_to_know(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        FILES.handle(tmp_path, AdapterShape(rank=1), 1)


def test_engines_say_what_they_hold(raises: Raises) -> None:
    def form(**backend: object) -> str:
        return snapshot_form(GenerationConfig.model_validate({"backend": backend}))

    assert form(name="hf") == "model"
    pytest.importorskip("nemorl_vllm")
    assert form(name="vllm", snapshots=2) == "adapters"
    with raises(UsageError, "snapshots", 2):
        form(name="vllm")
