"""Weights that two megatron ranks hold together reach a vLLM engine on a device of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nemorl.base.files.jsonl import read_jsonl
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig
from nemorl_rl.models.tiny import write_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")
pytest.importorskip("vllm", reason='vLLM is not installed: pip install "nemorl-vllm[cpu]"')

pytestmark = [pytest.mark.slow, pytest.mark.megatron, pytest.mark.vllm]


def train(tmp_path: Path, *, run: str = "run", tensor_parallel: int = 1, **cluster: object) -> None:
    """Three updates, and what the engine said about each rollout is what the trainer says."""
    model = tmp_path / "model"
    if not model.exists():
        write_tiny_model(model, hidden_size=64, intermediate_size=128, num_attention_heads=2)
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    config = GRPOConfig(
        **{
            "model": str(model),
            "run_dir": str(tmp_path / run),
            "policy": {
                "backend": "megatron",
                "tensor_parallel_size": tensor_parallel,
                "optimizer": {"lr": 1e-2},
                "max_sequence_tokens": 64,
            },
            "generation": {"backend": {"name": "vllm", "kv_cache_gib": 0.1}, "max_new_tokens": 8},
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "kl_penalty": 0.0,
            "cluster": cluster,
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0, "export": False},
            "max_steps": 3,
        }
    )
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(6)]
    config.build().fit(rows, lambda prompt, response: float(len(set(response))), console=Console(quiet=True))
    steps = [record for record in read_jsonl(tmp_path / run / "metrics.jsonl") if "train/grad_norm" in record]
    assert len(steps) == 3
    assert all(record["train/grad_norm"] > 0 for record in steps)  # so every rollout came from other weights
    assert [record["train/token_mult_prob_error"] for record in steps] == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.ray
@pytest.mark.usefixtures("private_ray")
@pytest.mark.full
def test_an_engine_speaks_for_two_tensor_parallel_trainers_after_every_update(tmp_path: Path) -> None:
    train(tmp_path, tensor_parallel=2, launcher="ray", workers_per_node=3, colocated=False, cpus_per_worker=0.5)


def test_two_runs_of_one_process_share_it_with_engines(tmp_path: Path) -> None:
    """Both make torch's default process group where it is missing, and the first run leaves one to the second."""
    train(tmp_path, run="first")
    train(tmp_path, run="second")
