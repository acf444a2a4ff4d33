"""A config in small: what stays, what is replaced, and what still is a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import ConfigError
from nemorl.plugins import registry
from nemorl_rl.chat.template_text import TemplateText
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_tasks.quickstart.shrinking import load_shrunk, shrunk
from nemorl_tasks.quickstart.trial import untried

BIG: dict[str, Any] = {
    "algorithm": "dapo",
    "model": "org/huge",
    "data": {"name": "file", "path": "/nowhere/train.jsonl", "chat": True},
    "environment": {
        "name": "weighted",
        "parts": {"judge": {"environment": {"name": "reward_model", "model": "org/rm"}}},
    },
    "policy": {
        "hf_config_overrides": {"rope_theta": 1e6},
        "backend": {"name": "dtensor", "layout": "packed", "attn_implementation": "flash_attention_2"},
        "tensor_parallel_size": 8,
        "precision": "bfloat16",
        "optimizer": {"lr": 2e-6},
    },
    "generation": {"backend": {"name": "vllm", "tensor_parallel_size": 2}, "max_new_tokens": 2048, "temperature": 0.9},
    "rollouts": {"mode": "async", "max_staleness": 3},
    "cluster": {"num_nodes": 4, "gpus_per_node": 8, "address": "auto", "colocated": False},
    "loggers": ["wandb"],
    "num_prompts_per_step": 512,
    "clip_high": 0.4,
    "max_steps": 5000,
}


def test_what_is_learnt_and_how_stays(tmp_path: Path) -> None:
    config: Any = load_shrunk(BIG, tmp_path)
    assert (config.algorithm, config.clip_high, config.policy.optimizer.lr) == ("dapo", 0.4, 2e-6)
    assert (config.policy.backend.layout, config.generation.temperature, config.rollouts.mode) == (
        "packed",
        0.9,
        "async",
    )
    assert registry().name_of("environments", type(config.environment)) == "weighted"


def test_machine_models_and_sizes_are_replaced(tmp_path: Path) -> None:
    small = shrunk(BIG, tmp_path)
    text = json.dumps(small)
    assert not any(word in text for word in ("org/", "vllm", "wandb", "parallel_size", "flash", "bfloat16", "nowhere"))
    config: Any = load_shrunk(BIG, tmp_path)
    assert (config.cluster.world_size, config.cluster.uses_ray, config.max_steps) == (1, False, 2)
    assert (config.num_prompts_per_step, config.generation.max_new_tokens) == (2, 8)
    judge = config.environment.parts["judge"].environment.model
    assert json.loads((Path(judge) / "config.json").read_text())["architectures"] == ["Qwen2ForSequenceClassification"]
    assert json.loads((Path(config.model) / "config.json").read_text())["num_hidden_layers"] == 2


def test_rows_that_can_be_seen_are_used(tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    seen = {"name": "file", "path": str(rows)}
    assert shrunk({**BIG, "data": seen}, tmp_path / "a")["data"] == seen
    assert shrunk({**BIG, "data": "arithmetic"}, tmp_path / "b")["data"] == "arithmetic"
    made_up = shrunk(BIG, tmp_path / "c")["data"]
    assert (made_up["chat"], len(Path(made_up["path"]).read_text().splitlines())) == (True, 16)


def test_models_of_a_server_and_data_to_validate_on(tmp_path: Path) -> None:
    judge = {"name": "judge", "url": "http://localhost:8000/v1", "model": "org/judge"}
    small = shrunk({**BIG, "environment": judge, "validation": {"data": "gsm8k", "num_generations": 1}}, tmp_path)
    assert small["environment"] == judge  # what has a url is not loaded here
    assert "data" not in small["validation"]
    kept = shrunk({**BIG, "validation": {"data": "arithmetic"}}, tmp_path / "own")
    assert kept["validation"]["data"] == "arithmetic"


def test_columns_that_a_config_names_are_made_up_too(tmp_path: Path) -> None:
    config = {"algorithm": "rm", "model": "org/m", "margin_column": "better_by", "data": {"name": "file", "path": "no"}}
    data = shrunk(config, tmp_path)["data"]
    assert json.loads(Path(data["path"]).read_text().splitlines()[0])["better_by"] == 1.0


def test_mistakes_that_are_not_of_size_are_reported(tmp_path: Path) -> None:
    wrong = {**BIG, "clip_hihg": 0.3, "policy": {"optimizer": {"lr": -1}}}
    with pytest.raises(ConfigError) as caught:
        load_shrunk(wrong, tmp_path)
    assert sorted(problem.path for problem in caught.value.problems) == ["clip_hihg", "policy.optimizer.lr"]


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"name": "file", "path": "/nowhere", "cat": True}, "data.cat"),
        ({"name": "huggingface", "path": "org/rows", "prompt_column": "a", "prompt_template": "{a}"},
         "data.prompt_template"),
        ("gsm9k", "data"),
    ],
)  # fmt: skip
def test_mistakes_of_data_that_is_elsewhere_are_reported(data: Any, path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_shrunk({**BIG, "data": data}, tmp_path)
    assert path in [problem.path for problem in caught.value.problems]


def test_published_data_are_replaced_to_train_and_to_validate_on(tmp_path: Path) -> None:
    config = load_shrunk(
        {**BIG, "data": "gsm8k", "validation": {"data": {"aime24": "aime24"}, "at_end": True}}, tmp_path
    )
    assert Path(config.data.path).parent == tmp_path  # type: ignore[union-attr]
    assert config.validation.data is None


@pytest.mark.parametrize("metric", ["validation/accuracy", "train/reward"])
def test_a_metric_that_ranks_checkpoints_is_still_measured(metric: str, tmp_path: Path) -> None:
    # Validation during training is left out; where the config has none at the end, nothing would log the metric.
    checkpoint = {"every": 5, "metric": metric}
    config = load_shrunk({**BIG, "validation": {"every": 5, "at_end": False}, "checkpoint": checkpoint}, tmp_path)
    assert config.checkpoint.metric == metric


STAGES = {
    "pipeline_parallel_size": 4,
    "virtual_pipeline_parallel_size": 2,
    "layers_in_first_stage": 7,
    "layers_in_last_stage": 7,
    "embedding_counts_as_layer": True,
    "head_counts_as_layer": True,
}


@pytest.mark.parametrize("option", [name for name in STAGES if name != "pipeline_parallel_size"])
def test_no_option_of_a_layout_is_left_without_its_layout(option: str, tmp_path: Path) -> None:
    backend = {"name": "megatron", "pipeline_parallel_size": 4, option: STAGES[option]}
    assert load_shrunk({**BIG, "policy": {"backend": backend}}, tmp_path).cluster.world_size == 1


def test_equal_rewards_are_said_to_show_little() -> None:
    assert untried([{"train/reward": 0.0}, {"train/reward": 0.0}])
    assert untried([{"train/reward": 0.0}, {"train/reward": 0.25}]) is None
    assert untried([{"train/loss": 2.0}]) is None  # nothing is rewarded


def test_a_small_model_shows_tools_to_agents_that_use_them(tmp_path: Path) -> None:
    config = load_shrunk(BIG, tmp_path)
    assert TemplateText(Tokenizer.load(str(config.model))).shows_tools


def test_options_of_routers_are_tried_on_a_mixture(tmp_path: Path) -> None:
    plain = shrunk({"algorithm": "grpo", "policy": {"backend": {"name": "megatron"}}}, tmp_path / "plain")
    backend = {"name": "megatron", "router": {"bias_update_rate": 0.001}}
    mixture = shrunk({"algorithm": "grpo", "policy": {"backend": backend}}, tmp_path / "mixture")
    kinds = [json.loads((Path(small["model"]) / "config.json").read_text())["model_type"] for small in (plain, mixture)]
    assert kinds == ["qwen2", "glm4_moe"]
    assert mixture["policy"]["backend"] == backend
