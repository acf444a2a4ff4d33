"""GRPO with adapters of experts: the engine speaks for the adapted experts, and the adapter is exported by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mixture_runs import write_mixture
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_rl.models.exporting import export_model
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_a_run_learns_and_its_adapter_is_exported(architecture: str, tmp_path: Path) -> None:
    model = write_mixture(tmp_path / "model", architecture)
    config = load_config(
        {
            "algorithm": "grpo",
            "model": model,
            "run_dir": str(tmp_path / "run"),
            "policy": {
                "lora": {"rank": 4, "target_modules": ["experts.gate_up_proj", "experts.down_proj"]},
                "optimizer": {"lr": 1e-2},
                "max_sequence_tokens": 64,
            },
            "generation": {"backend": "hf", "max_new_tokens": 8},
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "kl_penalty": 0.01,
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": STEPS, "export": True},
            "max_steps": STEPS,
        }
    )
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(6)]
    config.build().fit(rows, lambda prompt, response: float(len(set(response))), console=Console(quiet=True))
    steps = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/grad_norm" in record]
    assert [record["train/grad_norm"] > 0 for record in steps] == [True] * STEPS
    # Every rollout came from other weights: those of the merged experts.
    assert [record["train/token_mult_prob_error"] for record in steps] == pytest.approx([1.0] * STEPS, abs=1e-4)

    export_model(tmp_path / "run", tmp_path / "adapter", adapter=True)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".mlp.experts." in name for name in stored)
    assert any(bool(tensor.any()) for name, tensor in stored.items() if name.endswith("lora_B.weight"))
    ids = torch.tensor([[9, 20, 31, 42, 11, 10]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "adapter")).eval()
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        wanted, found, base = (each(input_ids=ids).logits for each in (merged, adapted, plain))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert float((base - wanted).abs().max()) > 1e-3
