"""GRPO runs with `policy.backend: megatron` learn, and what they learn does not depend on where and how they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_grpo.config import GRPOConfig
from nemorl_rl.models.exporting import export_model
from nemorl_rl.models.tiny import write_tiny_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
LOCAL: dict[str, Any] = {"gpus_per_node": 0}
TWO: dict[str, Any] = {"launcher": "ray", "workers_per_node": 2, "cpus_per_worker": 0.5}
NAMES = ("train/reward", "train/loss", "train/grad_norm", "train/total_num_tokens")


def digits(prompt: str, response: str) -> float:
    return float(sum(character.isdigit() for character in response))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights, so that both backends start from the same; and without a padding token, which this model would
    sample: transformers gives its embedding no gradient, wherever it stands."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "pad_token_id": None}
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), **sizes)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def train(
    model: Path,
    run_dir: Path,
    backend: Any,
    cluster: dict[str, Any],
    policy: dict[str, Any] | None = None,
    **changes: Any,
) -> TrainResult:
    config = GRPOConfig(**{
        "model": str(model),
        "policy": {"backend": backend, "optimizer": {"lr": 1e-3}, "max_sequence_tokens": 64, **(policy or {})},
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "kl_penalty": 0.01,
        "generation": {"max_new_tokens": 8},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0},
        "max_steps": 4,
        "cluster": cluster,
        "run_dir": run_dir,
        **changes,
    })  # fmt: skip
    return config.build().fit(dataset=ROWS, reward_fn=digits, console=Console(quiet=True))


def history(result: TrainResult) -> list[dict[str, float]]:
    return [{name: record[name] for name in NAMES} for record in result.history if "train/loss" in record]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return train(model, tmp_path_factory.mktemp("dtensor") / "run", "dtensor", LOCAL)


def assert_same_run(found: TrainResult, expected: TrainResult) -> None:
    for one, other in zip(history(found), history(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    weights = [load_file(result.run_dir / "model" / "model.safetensors") for result in (found, expected)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0])


def test_a_run_in_one_process_is_that_of_dtensor(model: Path, expected: TrainResult, tmp_path: Path) -> None:
    assert_same_run(train(model, tmp_path / "run", "megatron", LOCAL), expected)


@pytest.mark.parametrize(("first", "second"), [("dtensor", "megatron"), ("megatron", "dtensor")])
def test_one_backend_starts_from_the_weights_in_a_checkpoint_of_the_other(
    first: str, second: str, model: Path, tmp_path: Path
) -> None:
    result = train(model, tmp_path / "run", first, LOCAL, checkpoint={"every": 2}, max_steps=2)
    export_model(tmp_path / "run", tmp_path / "exported")
    policy = PolicyConfig.model_validate({"model_name": str(tmp_path / "exported"), "backend": second})
    backend = policy.backend.build(policy, WorkerContext(), reference=False)
    found = {name: tensor for bucket in backend.export_weights() for name, tensor in bucket.items()}
    backend.shutdown()
    expected = load_file(result.run_dir / "model" / "model.safetensors")
    started = load_file(model / "model.safetensors")
    assert not torch.equal(expected["model.norm.weight"], started["model.norm.weight"])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_run_learns(model: Path, tmp_path: Path) -> None:
    result = train(model, tmp_path / "run", "megatron", LOCAL, {"optimizer": {"lr": 5e-3}}, max_steps=40)
    rewards = [record["train/reward"] for record in history(result)]
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4])


@pytest.mark.full  # the verb itself: the check `a_scaled_rate_scales_the_update` of the conformance kit
def test_an_alert_lowers_the_rate(model: Path, tmp_path: Path) -> None:
    always = {"metric": "train/grad_norm", "above": 0.0, "patience": 2, "action": "lower_rate", "rate_factor": 0.25}
    hooks = [{"name": "alerts", "rules": {"always": always}}]
    train(model, tmp_path / "run", "megatron", LOCAL, plugins={"hooks": hooks}, max_steps=3)
    rates = [line["train/lr"] for line in read_jsonl(tmp_path / "run/metrics.jsonl") if "train/lr" in line]
    assert rates == [1e-3, 1e-3, 2.5e-4]


@pytest.mark.ray
@pytest.mark.usefixtures("private_ray")
@pytest.mark.parametrize(
    ("backend", "policy"),
    [
        pytest.param({"name": "megatron", "pipeline_parallel_size": 2}, {}, id="pipeline"),
        # What they export: `test_megatron_training`.
        pytest.param({"name": "megatron"}, {"tensor_parallel_size": 2}, id="tensor", marks=pytest.mark.full),
        pytest.param({"name": "megatron"}, {}, id="data", marks=pytest.mark.full),
    ],
)
def test_two_workers_on_ray_learn_what_one_process_does(
    backend: dict[str, Any], policy: dict[str, Any], model: Path, expected: TrainResult, tmp_path: Path
) -> None:
    assert_same_run(train(model, tmp_path / "run", backend, TWO, policy), expected)
