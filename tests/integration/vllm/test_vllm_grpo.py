"""A GRPO run that samples with vLLM: the quickstart's loop on the local launcher, engine and trainer in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nemorl_rl.models.tiny import write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_trainer_and_sampler_agree_in_every_step_of_a_run(tmp_path: Path) -> None:
    from nemorl_cli.console import Console
    from nemorl_grpo.config import GRPOConfig

    # Head size 32: the smallest that vLLM's attention takes.
    model = write_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=128, num_attention_heads=2)
    config = GRPOConfig(
        model=str(model),
        policy={"init": "random", "optimizer": {"lr": 3e-3}, "max_sequence_tokens": 64},
        generation={"backend": {"name": "vllm", "kv_cache_gib": 0.1}, "max_new_tokens": 12, "temperature": 0.9},
        num_prompts_per_step=4,
        num_generations_per_prompt=8,
        kl_penalty=0.0,
        max_steps=6,
        validation={"every": 0, "at_end": True},
        checkpoint={"every": 0, "export": False},
        run_dir=tmp_path / "run",
    )
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(4)]

    def digits(prompt: str, response: str) -> float:
        return sum(character.isdigit() for character in response) / max(1, len(response))

    config.build().fit(dataset=rows, reward_fn=digits, console=Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    errors = [line["train/token_mult_prob_error"] for line in lines if "train/token_mult_prob_error" in line]
    assert len(errors) == 6
    assert max(errors) < 1.001  # float32: a stale weight shows as 1.1 and more
