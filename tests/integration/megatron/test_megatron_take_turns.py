"""GRPO with `cluster.take_turns` and `policy.backend: megatron`, whatever generates: the numbers of a run without."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_rl.models.tiny import write_tiny_model
from tiers import only
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
CLOCK = ("time", "timing", "performance", "system")
VLLM = pytest.param(
    {"name": "vllm", "kv_cache_gib": 0.1},
    id="vllm",
    marks=[
        pytest.mark.full,
        pytest.mark.vllm,
        pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    ],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64, num_attention_heads=2)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def variety(prompt: str, response: str) -> float:
    return float(len(set(response)))


def measured(model: Path, run_dir: Path, engine: Any, **cluster: Any) -> list[dict[str, Any]]:
    """The metrics of a run, without what depends on the clock."""
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "run_dir": str(run_dir),
            "policy": {"backend": "megatron", "optimizer": {"lr": 1e-2}, "max_sequence_tokens": 64},
            "generation": {"backend": engine, "max_new_tokens": 6},
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "kl_penalty": 0.1,
            "cluster": cluster,
            "validation": {"every": 2, "max_samples": 2},
            "checkpoint": {"every": 2, "export": False},
            "max_steps": 3,
        }
    )
    assert config.place().takes_turns == cluster.get("take_turns", False)
    config.build().fit(ROWS, variety, val_dataset=ROWS, console=Console(quiet=True))
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in r.items() if not name.startswith(CLOCK)} for r in records]


@pytest.mark.parametrize("engine", [*only("megatron", of=("megatron", "hf")), VLLM])
def test_taking_turns_changes_no_number(engine: Any, model: Path, tmp_path: Path) -> None:
    staying = measured(model, tmp_path / "staying", engine)
    moving = measured(model, tmp_path / "moving", engine, take_turns=True)
    assert moving == staying
    assert sum("train/loss" in record for record in staying) == 3
