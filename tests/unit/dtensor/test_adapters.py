"""Adapters apart from their model: what peft and other programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import UsageError
from nemorl_dtensor import DTensorConfig
from nemorl_tensors import TokenBatch
from peft import PeftModel
from recorded_messages import Raises
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from .conftest import Build, plain_logprobs

LORA = {"rank": 4, "alpha": 12.0}


@pytest.fixture
def trained(build: Build, batch: TokenBatch, weighted_nll: Any) -> Any:
    """Adapters that are far from zero."""
    backend = build(lora=LORA)
    for _ in range(3):
        backend.train_step(batch, weighted_nll)
    return backend


def test_peft_loads_the_folder_and_scores_as_the_trainer_does(
    trained: Any, pretrained: Path, batch: TokenBatch, tmp_path: Path
) -> None:
    trained.save_adapters(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    without = plain_logprobs(base, batch)
    adapted = plain_logprobs(PeftModel.from_pretrained(base, str(tmp_path)).eval(), batch)
    ours = trained.get_logprobs(batch)
    assert (ours - without).abs().max() > 0.1, "the adapters change what the model says"
    torch.testing.assert_close(adapted, ours, rtol=0, atol=1e-6)


def test_the_folder_says_what_it_adapts(trained: Any, pretrained: Path, tmp_path: Path) -> None:
    trained.save_adapters(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["r"], written["lora_alpha"]) == (str(pretrained), 4, 12.0)
    assert written["inference_mode"] is True
    linear = {"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"}
    assert {name.rpartition(".")[2] for name in written["target_modules"]} == linear


def test_exported_adapters_are_those_of_the_file_and_nothing_else(trained: Any, tmp_path: Path) -> None:
    trained.save_adapters(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    exported = {name: tensor for bucket in trained.export_adapters() for name, tensor in bucket.items()}
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)
    # Tiny: hidden 32, feed-forward 64, and per layer seven linear layers, each R * (inputs + outputs).
    layers = trained._model.config.num_hidden_layers
    assert len(stored) == layers * 7 * 2
    down = stored["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
    assert down.shape == (4, 64)


def test_adapters_of_a_bfloat16_model_are_float32_and_keep_no_float32_activation(
    build: Build, batch: TokenBatch, weighted_nll: Any
) -> None:
    backend = build(lora=LORA, precision="bfloat16")
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backend.train_step(batch, weighted_nll)
    own = [p for name, p in backend._model.named_parameters() if ".lora_" in name]
    assert {p.dtype for p in own} == {torch.float32}
    ffn = 64  # hidden 32: only the input of down_proj has this width
    weights = {p.data_ptr() for p in own}
    wide = [t for t in kept if t.dtype == torch.float32 and t.shape[-1:] == (ffn,)]
    widened = [t for t in wide if t.data_ptr() not in weights]
    assert not widened, f"{len(widened)} inputs of down_proj were kept in float32"


def test_a_model_without_adapters_has_none_to_write(build: Build, tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, "policy.lora"):
        build().save_adapters(tmp_path)


def test_ranks_that_share_a_layer_drop_nothing() -> None:
    spread = {"tensor_parallel_size": 2, "model_name": "org/model"}
    plain = PolicyConfig.model_validate({**spread, "lora": LORA})
    assert not [*plain.problems(), *DTensorConfig().rank_problems(plain, 2)]
    dropping = PolicyConfig.model_validate({**spread, "lora": {**LORA, "dropout": 0.1}})
    (problem,) = DTensorConfig().rank_problems(dropping, 2)
    assert problem.path == "lora.dropout"
