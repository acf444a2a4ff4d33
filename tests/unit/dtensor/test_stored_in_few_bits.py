"""Weights that a checkpoint stores in few bits are decoded when they are loaded, and learn like others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl_dtensor.model import load_model
from safetensors.torch import load_file, save_file

HALVES = [0, 1, 2, 3, 4, 6, 8, 12]
"""Twice what the codes 0 to 7 of a number in 4 bits (E2M1) stand for; codes 8 to 15 are the same below 0."""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A gpt-oss of one layer whose experts are in MXFP4: two codes in a byte, a power of 2 for each 32 of them."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        **{"num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 64, "head_dim": 16},
        **{"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64},
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        whole = f"model.layers.0.mlp.experts.{name}"
        experts, inputs, outputs = tensors.pop(whole).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
        tensors[f"{whole}_blocks"] = blocks
        tensors[f"{whole}_scales"] = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8, generator=draw)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    return tmp_path


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_experts_in_four_bits_are_the_numbers_that_their_codes_stand_for(stored: Path, precision: str) -> None:
    policy = PolicyConfig.model_validate({"model_name": str(stored), "precision": precision})
    model = load_model(policy)
    tensors = load_file(stored / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(model.model.layers[0].mlp.experts, name)
        codes = tensors[f"model.layers.0.mlp.experts.{name}_blocks"].long()
        # The lower half of a byte comes first; a scale s means 2^(s - 127).
        pairs = torch.stack([codes % 16, codes // 16], -1).flatten(-2)
        numbers = torch.tensor([*HALVES, *(-half for half in HALVES)])[pairs] / 2
        scales = 2.0 ** (tensors[f"model.layers.0.mlp.experts.{name}_scales"].float() - 127)
        expected = (numbers * scales[..., None]).flatten(2).transpose(1, 2)
        assert weight.dtype == getattr(torch, precision)
        assert torch.equal(weight.float(), expected)
        assert expected.abs().max() > 0.01


def test_what_is_decoded_learns(stored: Path) -> None:
    policy = PolicyConfig.model_validate({"model_name": str(stored), "precision": "float32"})
    model = load_model(policy).requires_grad_(True)
    model(torch.tensor([[3, 5, 7]])).logits[0, -1].logsumexp(-1).backward()
    gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad
    assert gradient is not None
    assert gradient.abs().max() > 0
