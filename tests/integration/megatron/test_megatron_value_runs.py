"""Runs of PPO and of reward models over megatron-core are those of dtensor, also in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_testing.models import tiny_model
from test_megatron_values import write_classifier

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROWS = [
    {"prompt": f"{a}+1=", "answer": str(a + 1), "chosen": str(a + 1), "rejected": str((a + 5) % 9)} for a in range(8)
]
NAMES = ("train/loss", "train/grad_norm", "train/critic/loss", "train/critic/grad_norm", "train/reward")


def language_model() -> Path:
    """Without a padding token, which it would sample: transformers gives its embedding no gradient."""
    return tiny_model(pad_token_id=None)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("classifier")
    write_tiny_model(folder)  # the tokenizer
    return write_classifier(folder, language_model())


def variety(prompt: str, response: str) -> float:
    return float(len(set(response)))


def history(run: dict[str, Any], run_dir: Path, backend: str, **cluster: Any) -> list[dict[str, float]]:
    policy = {"backend": backend, "optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_sequence_tokens": 32}
    config = load_config(
        {
            "run_dir": str(run_dir),
            "policy": policy,
            "cluster": cluster,
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0},
            "max_steps": 3,
            **run,
        }
    )
    inputs = {} if run["algorithm"] == "rm" else {"reward_fn": variety}
    result = config.build().fit(ROWS, console=Console(quiet=True), **inputs)
    records = [record for record in result.history if "train/loss" in record]
    return [{name: record[name] for name in NAMES if name in record} for record in records]


def test_a_reward_model_is_that_of_dtensor(classifier: str, tmp_path: Path) -> None:
    run = {"algorithm": "rm", "model": classifier, "batch_size": 4}
    found, expected = (history(run, tmp_path / backend, backend) for backend in ("megatron", "dtensor"))
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_ppo_is_that_of_dtensor_also_in_turns(classifier: str, tmp_path: Path) -> None:
    run = {
        "algorithm": "ppo",
        "model": str(language_model()),
        "critic": {"model_name": classifier, "optimizer": {"lr": 1e-3, "eps": 1e-3}},
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 1,
        # Once all tokens are clipped the gradient is 0, and only dtensor's Adam goes on by its momentum.
        "num_minibatches": 2,
        "num_epochs_per_rollout": 1,
        "generation": {"max_new_tokens": 4},
    }
    found, expected = (history(run, tmp_path / backend, backend) for backend in ("megatron", "dtensor"))
    assert len(found) == 3
    assert "train/critic/loss" in found[0]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert history(run, tmp_path / "turns", "megatron", take_turns=True) == found
