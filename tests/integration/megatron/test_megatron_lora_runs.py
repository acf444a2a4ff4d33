"""GRPO with LoRA over megatron-core: after every update each engine speaks for the adapted policy."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_testing.models import tiny_model

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.megatron]

VLLM = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]
SMALL_VLLM = {"name": "vllm", "kv_cache_gib": 0.1}


@pytest.mark.parametrize(
    ("engine", "adapters"),
    [
        ("hf", "merged"),
        ("megatron", "merged"),
        pytest.param(SMALL_VLLM, "merged", marks=[*VLLM, pytest.mark.full], id="vllm-merged"),
        pytest.param(SMALL_VLLM, "separate", marks=VLLM, id="vllm-separate"),
    ],
)
def test_engines_speak_for_the_adapted_policy(engine: Any, adapters: str, tmp_path: Path) -> None:
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model()),
            "run_dir": str(tmp_path / "run"),
            "policy": {
                "backend": "megatron",
                "lora": {"rank": 8},
                "optimizer": {"lr": 1e-2},
                "max_sequence_tokens": 64,
            },
            "generation": {"backend": engine, "max_new_tokens": 8},
            "rollouts": {"adapters": adapters},
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "kl_penalty": 0.01,
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0, "export": False},
            "max_steps": 3,
        }
    )
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(6)]
    config.build().fit(rows, lambda prompt, response: float(len(set(response))), console=Console(quiet=True))
    steps = [record for record in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/grad_norm" in record]
    assert len(steps) == 3
    assert all(record["train/grad_norm"] > 0 for record in steps)  # so every rollout came from other weights
    assert [record["train/token_mult_prob_error"] for record in steps] == pytest.approx([1.0] * 3, abs=1e-4)
