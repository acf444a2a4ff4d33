"""Old configs as nemorl configs: inheritance, interpolation, every kind of key, and nothing lost in silence."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from command_line import Command
from nemorl.config.load import load_config
from nemorl.errors import DataError, UsageError
from nemorl_compat import legacy_yaml
from nemorl_compat.conversions.prompts import template_of
from nemorl_compat.migration import Migration, migrate, migrate_file
from nemorl_compat.migration_report import summary
from old_configs import DPO, GRPO, SFT
from omegaconf import OmegaConf
from recorded_messages import Raises
from whole_configs import put, whole


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


def migrated(folder: Path, text: str, **options: Any) -> Migration:
    write(folder, "prompts/cot.txt", "Think first.\n\n{}")
    return migrate_file(write(folder, "old.yaml", text), **options)


APART: dict[str, Any] = {
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources.gpus_per_node": 1,
    "cluster.gpus_per_node": 2,
}
"""A device for generation and one for training."""


def outcome(base: str, changes: dict[str, Any], key: str) -> tuple[str, str]:
    config = whole(base)
    for path, value in changes.items():
        put(config, path, value)
    found = next(change for change in migrate(config, allow_loss=("*",)).changes if change.key == key)
    return found.outcome.kind, found.outcome.text


def test_a_grpo_config_becomes_a_short_one(tmp_path: Path) -> None:
    found = migrated(tmp_path, GRPO)
    assert found.is_complete, found.features
    assert found.config["num_minibatches"] == 2  # 8 prompts of 4 responses, 16 per optimizer step
    assert found.config["importance_correction"] == {"kind": "truncated", "cap": 3.0}
    assert found.config["clip_high"] == 0.28
    assert found.config["policy"]["schedule"] == {"warmup_steps": 13}
    assert found.config["generation"]["max_new_tokens"] == 511  # a prompt needs one
    assert found.config["validation"] == {"every": 20, "at_end": False, "max_samples": 64, "temperature": 0.8}
    assert found.config["kl_gradient"] == "estimator"  # data without sections: a config of January 2026
    assert found.config["data"]["prompt_template"].startswith("Think first.\n\n{")
    assert found.config["loggers"] == [{"name": "wandb", "project": "small-runs", "run_name": "first"}]


GYM: dict[str, Any] = {
    "env.should_use_nemo_gym": True,
    "env.should_mask_flagged_samples": True,
    "env.nemo_gym": {
        "port_range_low": 5000,
        "config_paths": [
            "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
            "resources_servers/code_gen/configs/code_gen.yaml",
        ],
        "code_gen": {"resources_servers": {"code_gen": {"num_processes": 64, "language": "python"}}},
        "policy_model": {
            "responses_api_models": {
                "vllm_model": {
                    "uses_reasoning_parser": False,
                    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
                }
            }
        },
    },
    "policy.generation.vllm_cfg.expose_http_server": True,
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs": {"enable_auto_tools": True, "tool_parser": "hermes"},
    "data.train": {"data_path": "gym/train.jsonl"},
    "data.validation": {"data_path": "gym/validation.jsonl"},
    "data.default": {
        "dataset_name": "NemoGymDataset",
        "env_name": "nemo_gym",
        "processor": "nemo_gym_data_processor",
    },
}
"""What recipes under ``examples/nemo_gym`` say beside the rest."""


def with_gym(**changes: Any) -> Migration:
    config = whole("grpo")
    for path, value in deepcopy({**GYM, **changes}).items():
        put(config, path, value)
    return migrate(config)


def test_a_config_of_nemo_gym_starts_its_servers_before_a_model_server_that_forwards() -> None:
    found = with_gym()
    assert found.is_complete, found.features
    assert found.config["environment"] == {
        "name": "nemo_gym",
        "start": {
            "config_paths": [
                "responses_api_models/openai_model/configs/openai_model.yaml",
                "resources_servers/code_gen/configs/code_gen.yaml",
            ],
            "overrides": [
                "++code_gen.resources_servers.code_gen.num_processes=64",
                '++code_gen.resources_servers.code_gen.language="python"',
            ],
        },
    }
    assert found.config["data"] == {"name": "nemo_gym", "path": "gym/train.jsonl"}
    assert found.config["validation"]["data"] == {"name": "nemo_gym", "path": "gym/validation.jsonl"}
    assert found.config["policy"]["tokenizer"]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"env.should_mask_flagged_samples": False},
        {"env.should_use_nemo_gym": False},
        {"data.default.env_name": "math"},
        {"env.nemo_gym.config_paths": ["resources_servers/code_gen/configs/code_gen.yaml"]},
        {"env.nemo_gym.is_trajectory_collection": True},
        {"env.nemo_gym.policy_model": {"responses_api_models": {"vllm_model": {"extra_body": {"seed": 1}}}}},
        {"policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template": "x"},
    ],
)
def test_what_of_nemo_gym_has_no_counterpart_is_missing(changes: dict[str, Any]) -> None:
    assert not with_gym(**changes).is_complete


def test_an_sft_config_with_sections_of_data(tmp_path: Path) -> None:
    found = migrated(tmp_path, SFT)
    assert found.is_complete, found.features  # the files are not here, but they may be there
    columns = {"prompt_column": "question", "response_column": "solution"}
    assert found.config["data"] == {"name": "file", "path": "train.jsonl", **columns}
    assert found.config["validation"]["data"] == {"name": "file", "path": "held_out.jsonl", **columns}
    assert found.config["policy"]["lora"] == {"rank": 8, "alpha": 32, "dropout": 0.0, "target_modules": "all-linear"}
    assert found.config["policy"]["schedule"]["min_lr_frac"] == pytest.approx(0.1)
    assert found.config["cluster"] == {"num_nodes": 2, "gpus_per_node": 8, "address": "auto"}


def test_a_base_config_reports_at_most_five_lines(tmp_path: Path) -> None:
    lines = summary(migrated(tmp_path, GRPO))
    assert 1 < len(lines) <= 5
    assert "keys mapped" in lines[0]


def test_what_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    found = migrated(tmp_path, DPO)
    assert not found.is_complete
    assert [change.key for change in found.refused] == ["policy.optimizer.name", "my_own.answer"]
    assert "another optimizer than AdamW" in found.features
    assert "the unknown key my_own.answer" in found.features
    different = {change.key for change in found.of("different")}
    assert "policy.dtensor_cfg.custom_parallel_plan" in different


def test_a_loss_that_is_allowed_is_told(tmp_path: Path) -> None:
    found = migrated(tmp_path, DPO, allow_loss=["policy.optimizer.*", "my_own.*"])
    assert found.is_complete, found.features
    assert found.config["beta"] == 0.1
    assert any("2 lost, as allowed: policy.optimizer.name, my_own.answer" in line for line in summary(found))
    assert yaml.safe_load(found.to_yaml()) == found.config


@pytest.mark.parametrize(
    ("base", "changes", "key", "kind", "words"),
    [
        # What was dropped, or turned into something else, before the table.
        ("grpo", {"policy.generation.vllm_cfg.precision": "fp8"}, "", "mapped", ""),
        ("grpo", {"policy.generation.vllm_cfg.is_mx": True}, "", "neutral", "inactive"),
        (
            "grpo",
            {
                "policy.generation.vllm_cfg.precision": "fp8",
                "policy.generation.vllm_cfg.pow2_weight_scaling_factors": 1,
            },
            "",
            "missing",
            "powers of two",
        ),
        ("megatron", {"policy.megatron_cfg.fp8_cfg": {"enabled": True}}, ".enabled", "missing", "FP8 training"),
        ("megatron", {"policy.megatron_cfg.peft": {"enabled": True}}, ".enabled", "mapped", ""),
        (
            "megatron",
            {"policy.megatron_cfg.peft": {"enabled": True, "target_modules": ["in_proj"]}},
            ".target_modules",
            "missing",
            "LoRA of these layers",
        ),
        (
            "megatron",
            {"policy.megatron_cfg.peft": {"enabled": True, "exclude_modules": ["*out_proj*"]}},
            ".exclude_modules",
            "missing",
            "left out of LoRA",
        ),
        (
            "megatron",
            {"policy.megatron_cfg.peft": {"enabled": True, "dropout": 0.1, "dropout_position": "post"}},
            ".dropout_position",
            "different",
            "the input of the adapters",
        ),
        (
            "grpo",
            {"policy.generation.vllm_kwargs.speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
            ".num_speculative_tokens",
            "missing",
            "speculative decoding",
        ),
        ("ppo", {"value.megatron_cfg.enabled": True}, "", "mapped", ""),
        ("ppo", {"value.megatron_cfg.enabled": True, "value.reward_model_cfg.enabled": False}, "", "neutral", "inact"),
        ("ppo", {"value.reward_model_cfg.enabled": False}, "", "missing", "without its head"),
        ("ppo", {"value.dtensor_cfg.enabled": False}, "", "missing", "without a training backend"),
        ("ppo", {"policy.generation.top_p": 0.9}, "", "missing", "filtered by top-p"),
        ("ppo", {"policy.generation.top_k": 50}, "", "missing", "filtered by top-p"),
        ("grpo", {"policy.dtensor_cfg.context_parallel_size": 2}, "", "mapped", ""),
        ("grpo", {"policy.reward_model_cfg": {"enabled": True}}, ".enabled", "missing", "reward head"),
        ("sft", {"data.use_multiple_dataloader": True}, "", "missing", "several dataloaders"),
        ("grpo", {"env.should_use_nemo_gym": True}, "", "missing", "NeMo-Gym"),
        ("grpo", {"data.default.env_name": "nemo_gym"}, "", "missing", "NeMo-Gym"),
        ("grpo", {"env.sliding_puzzle_game.cfg": {"size": 3}}, ".size", "missing", "sliding_puzzle_game"),
        ("grpo", {"env.math.num_wokers": 3}, "", "unknown", "num_workers"),
        ("grpo", {"policy.draft": None}, "", "neutral", "inactive"),
        ("grpo", {"policy.megatron_cfg.optimizer": {}}, "", "neutral", "inactive"),
        ("grpo", {"policy.is_vlm": True}, "", "neutral", "unread"),
        ("grpo", {"loss_fn.disable_ppo_ratio": True}, "", "missing", "without the ratio"),
        ("grpo", {"logger.other_enabled": True}, "", "unknown", ""),
        ("grpo", {"policy.max_total_sequence_lenght": 1}, "", "unknown", "max_total_sequence_length"),
        ("grpo", {"loss_fn.force_on_policy_ratio": True}, "", "neutral", "same"),
        (
            "grpo",
            {"policy.train_global_batch_size": 8, "loss_fn.force_on_policy_ratio": True},
            "",
            "missing",
            "several updates",
        ),
        ("grpo", {"policy.megatron_cfg.freeze_moe_router": True}, "", "neutral", "inactive"),
        ("megatron", {"policy.megatron_cfg.freeze_moe_router": True}, "", "neutral", "inactive"),
        (
            "megatron",
            {"policy.model_name": "Qwen/Qwen3-30B-A3B", "policy.megatron_cfg.moe_router_enable_expert_bias": True},
            "",
            "neutral",
            "unread",
        ),
        (
            "megatron",
            {"policy.model_name": "Qwen/Qwen3-30B-A3B", "policy.megatron_cfg.moe_router_bias_update_rate": 0.001},
            "",
            "neutral",
            "inactive",
        ),
        (
            "megatron",
            {
                "policy.model_name": "Qwen/Qwen3-30B-A3B",
                "policy.megatron_cfg.moe_router_load_balancing_type": "aux_loss",
            },
            "",
            "different",
            "each sequence",
        ),
        (
            "megatron",
            {
                "policy.model_name": "Qwen/Qwen3-30B-A3B",
                "policy.megatron_cfg.moe_router_load_balancing_type": "sinkhorn",
            },
            "",
            "missing",
            "balance",
        ),
        ("grpo", {"logger.monitor_gpus": True}, "", "neutral", "record"),
        ("distillation", {"teacher.max_grad_norm": 3.0}, "", "neutral", "inactive"),
        ("ppo", {"value.dtensor_cfg.context_parallel_size": 2}, "", "mapped", ""),
        ("ppo", {"value.max_total_sequence_length": 99}, "", "missing", "of its own"),
    ],
)
def test_the_class_of_a_key(base: str, changes: dict[str, Any], key: str, kind: str, words: str) -> None:
    found = outcome(base, changes, f"{list(changes)[-1]}{key}")
    assert found[0] == kind, found
    assert words in found[1]


@pytest.mark.parametrize(("corrects", "kind"), [(False, "truncated"), (True, "plain")])
def test_fp8_rollouts_are_corrected_for(corrects: bool, kind: str, tmp_path: Path) -> None:
    config = whole("grpo")
    put(config, "policy.precision", "bfloat16")
    put(config, "cluster.gpus_per_node", 8)
    put(config, "policy.generation.vllm_cfg.precision", "fp8")
    put(config, "loss_fn.use_importance_sampling_correction", corrects)
    found = migrate(config, folders=(tmp_path,))
    assert found.config["generation"]["backend"]["precision"] == "fp8"
    assert load_config(found.config, for_cluster=True).importance_correction.kind == kind
    key = "loss_fn.use_importance_sampling_correction"
    (outcome,) = [change.outcome.kind for change in found.changes if change.key == key]
    assert outcome == ("mapped" if corrects else "different")


def test_an_engine_over_several_gpus_may_share_them_with_training() -> None:
    config = whole("grpo")
    put(config, "policy.generation.vllm_cfg.tensor_parallel_size", 2)
    put(config, "policy.generation.vllm_cfg.pipeline_parallel_size", 2)
    put(config, "cluster.gpus_per_node", 4)
    put(config, "data.default.prompt_file", None)
    found = migrate(config)
    assert found.is_complete, found.features
    assert found.config["cluster"] == {"gpus_per_node": 4}
    put(config, "policy.generation.colocated", {"enabled": False, "resources": {"gpus_per_node": 4}})
    put(config, "cluster.gpus_per_node", 8)
    found = migrate(config)
    assert found.config["cluster"] == {"gpus_per_node": 8, "colocated": False, "generation_workers": 1}


def test_experts_are_spread_over_the_devices_of_a_layer_or_over_the_ranks_of_a_node() -> None:
    config = whole("grpo")
    put(config, "cluster.gpus_per_node", 8)
    put(config, "data.default.prompt_file", None)
    put(config, "policy.generation.vllm_cfg.tensor_parallel_size", 4)
    put(config, "policy.generation.vllm_cfg.expert_parallel_size", 4)
    found = migrate(config)
    assert found.is_complete, found.features
    assert found.config["generation"]["backend"]["expert_parallel"] is True
    assert "data_parallel_size" not in found.config["generation"]["backend"]
    beyond = "an engine whose experts spread over more GPUs than its layers, which are divided or on several nodes"
    for ways in (6, 8, 16):  # no ranks of 4 devices; two, of divided layers; four on two nodes
        put(config, "policy.generation.vllm_cfg.expert_parallel_size", ways)
        assert beyond in migrate(config).features
    put(config, "policy.generation.vllm_cfg.tensor_parallel_size", 1)
    assert beyond in migrate(config).features
    put(config, "policy.generation.vllm_cfg.expert_parallel_size", 8)
    found = migrate(config)
    assert found.is_complete, found.features
    engine = found.config["generation"]["backend"]
    # 8 ways for experts are 8 ranks of one device, as NeMo RL has vLLM do it: EP = DP * TP.
    assert (engine["data_parallel_size"], engine["expert_parallel"]) == (8, True)
    assert engine.get("tensor_parallel_size", 1) == 1


def test_a_mixture_may_split_its_attention_and_divide_its_experts() -> None:
    config = whole("grpo")
    put(config, "policy.dtensor_cfg.tensor_parallel_size", 2)
    for experts, cuts in ((1, False), (2, True)):
        put(config, "policy.dtensor_cfg.expert_parallel_size", experts)
        found = migrate(config)
        backend = found.config["policy"]["backend"]
        assert (backend.get("expert_parallel_size", 1), backend.get("sequence_parallel", True)) == (experts, cuts)


def test_an_engine_takes_whole_nodes_or_a_part_of_one() -> None:
    config = whole("grpo")
    put(config, "cluster", {"gpus_per_node": 4, "num_nodes": 4})
    put(config, "data.default.prompt_file", None)
    put(config, "policy.generation.vllm_cfg.tensor_parallel_size", 4)
    put(config, "policy.generation.vllm_cfg.pipeline_parallel_size", 2)
    found = migrate(config)
    assert found.is_complete, found.features
    assert found.config["generation"]["backend"]["pipeline_parallel_size"] == 2
    put(config, "policy.generation.vllm_cfg.tensor_parallel_size", 3)  # 6 devices: a node and a half
    assert "an engine over a part of a node beside whole ones" in migrate(config).features


def test_fp8_leaves_out_the_layers_that_keep_bfloat16() -> None:
    config = whole("grpo")
    put(config, "policy.precision", "bfloat16")
    for name, value in {
        "precision": "fp8",
        "is_mx": True,
        "num_first_layers_in_bf16": 2,
        "num_last_layers_in_bf16": 0,
        "quantization_ignored_layer_kws": ["q_proj", "k_proj", "v_proj"],
    }.items():
        put(config, f"policy.generation.vllm_cfg.{name}", value)
    backend = migrate(config).config["generation"]["backend"]
    assert backend["precision"] == "mxfp8"
    assert backend["kept_layers"] == {"first": 2, "names": ["q_proj", "k_proj", "v_proj"]}


def test_gspo_weighs_whole_responses() -> None:
    """NeMo RL corrects GSPO by exp of the sum of log-ratios, which is `per: sequence` here."""
    config = whole("grpo")
    put(config, "data.default.prompt_file", None)
    put(config, "loss_fn.sequence_level_importance_ratios", True)
    put(config, "loss_fn.token_level_loss", False)
    put(config, "loss_fn.use_importance_sampling_correction", True)
    found = migrate(config)
    assert found.is_complete, found.features
    assert found.config["importance_correction"] == {"kind": "plain", "per": "sequence"}


def test_what_sampling_leaves_out_training_leaves_out() -> None:
    config = whole("grpo")
    put(config, "data.default.prompt_file", None)
    put(config, "policy.generation.top_k", 50)
    found = migrate(config)
    assert found.is_complete, found.features
    assert (found.config["filtered_logprobs"], found.config["generation"]["top_k"]) == (True, 50)


def test_weights_of_rewards_stay_a_list_which_both_read_in_the_order_of_the_names() -> None:
    config = whole("grpo")
    put(config, "data.default", {"env_name": "math_multi_reward"})
    put(config, "grpo.adv_estimator", {"name": "gdpo", "reward_weights": [1.0, 0.5, 0.25]})
    found = migrate(config)
    assert found.is_complete, found.features
    assert found.config["environment"] == "multi_reward_math"
    assert found.config["reward_weights"] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("sampler", "expected", "kind"),
    [
        ({"name": "windowed", "max_staleness_versions": 2}, ("async", 2, "drop"), "mapped"),
        ({"name": "ready_first"}, ("async", 1, "train"), "mapped"),
        ({"name": "in_order", "max_lookahead_versions": 2}, ("async", 2, "drop"), "different"),
        ({"name": "in_order", "max_lookahead_versions": 0}, ("sync", 0, "drop"), "neutral"),
        ({"name": "weight_fifo"}, None, "missing"),
    ],
)
def test_the_single_controller_runs_ahead_as_far_as_its_sampler_allows(
    sampler: dict[str, Any], expected: Any, kind: str, prompts: Path
) -> None:
    config = whole("grpo")
    for path, value in {**APART, "async_rl": {"sampler": sampler}}.items():
        put(config, path, value)
    found = migrate(config, folders=(prompts,))
    (outcome,) = [change.outcome.kind for change in found.changes if change.key == "async_rl.sampler.name"]
    assert outcome == kind
    assert found.is_complete == (expected is not None), found.features
    if expected is not None:
        rollouts = load_config(found.config, for_cluster=True).rollouts
        assert (rollouts.mode, rollouts.max_staleness, rollouts.on_stale) == expected


def test_an_asynchronous_loop_of_ppo_counts_steps_alone(prompts: Path) -> None:
    config = whole("ppo")
    put(config, "ppo.max_num_epochs", -1)
    assert not migrate(config, folders=(prompts,)).is_complete
    for path, value in {**APART, "ppo.async_ppo": {"enabled": True, "max_trajectory_age_steps": 1}}.items():
        put(config, path, value)
    found = migrate(config, folders=(prompts,))
    assert found.is_complete, found.features
    assert found.config["max_epochs"] == 100_000


@pytest.mark.parametrize("place", ["https://files.test/sums.csv?v=1", "sums.csv"])
def test_questions_of_ones_own_are_a_file_which_nobody_downloads(place: str) -> None:
    config = whole("eval")
    own = {"dataset_name": place, "problem_key": "Question", "solution_key": "Answer", "file_format": "csv"}
    put(config, "data", {**own, "split": "train", "prompt_file": None})
    found = migrate(config)
    assert found.is_complete, found.features
    files = {"name": "file", "path": "sums.csv", "validation_path": "sums.csv", "chat": True}
    assert found.config["data"] == {**files, "prompt_column": "Question", "answer_column": "Answer"}
    (said,) = [change.outcome for change in found.changes if change.key == "data.dataset_name"]
    assert said.kind == ("different" if "://" in place else "mapped")


def test_without_a_validation_set_nothing_is_validated() -> None:
    config = whole("grpo")
    put(config, "data.default.prompt_file", None)
    put(config, "data.train.split_validation_size", 0.0)
    assert migrate(config).config["validation"]["every"] == 0


def test_a_dataset_that_is_repeated_is_several_responses_per_row() -> None:
    config = whole("grpo")
    put(config, "data.default.prompt_file", None)
    put(config, "data.validation", {"dataset_name": "AIME2024", "repeat": 16})
    put(config, "grpo.max_val_samples", 480)
    put(config, "grpo.val_batch_size", 960)
    found = migrate(config).config["validation"]
    assert (found["num_generations"], found["max_samples"]) == (16, 30)  # 480 = 30 problems, 16 times


def test_several_datasets_are_a_mixture_and_several_sets() -> None:
    config = whole("grpo")
    put(config, "data.default.prompt_file", None)
    put(config, "data.train", [{"dataset_name": "OpenMathInstruct-2"}, {"dataset_name": "DeepScaler"}])
    put(
        config,
        "data.validation",
        [{"dataset_name": "AIME2024", "repeat": 4}, {"dataset_name": "AIME2025", "repeat": 4}],
    )
    found = migrate(config)
    assert found.is_complete, found.features
    assert [part["data"]["preset"] for part in found.config["data"]["parts"]] == ["OpenMathInstruct-2", "DeepScaler"]
    assert list(found.config["validation"]["data"]) == ["aime2024_1", "aime2025_2"]
    assert (found.config["validation"]["num_generations"], found.config["validation"]["max_samples"]) == (4, 64)


@pytest.mark.parametrize(
    "text",
    [
        "Answer in \\\\boxed{{}}.:\n{}\n\nThink",
        "{}",
        "{0} {{x}} {{{0}}}",
        "no problem at all",
        "{{{{}}}} {}\n\n",
    ],
)
def test_a_template_renders_as_str_format(text: str) -> None:
    from nemorl_tasks.datasets.mapping import ColumnMapping

    problem = "What is {2} + {two}? }{"
    mapping = ColumnMapping(columns={}, prompt_template=template_of(text, "problem"))
    found = mapping.convert({"problem": problem, "prompt": "other"}, number=0, source="test")
    assert found["prompt"] == text.format(problem)


@pytest.mark.parametrize("text", ["{question}", "{:>10}", "{", "{} {1}", "{} {}", "{} {0}"])
def test_a_template_that_str_format_would_refuse_is_refused(text: str, raises: Raises) -> None:
    with raises(DataError, "cot.txt"):
        template_of(text, "problem", "cot.txt")


def test_files_inherit_in_order_and_lists_are_replaced(tmp_path: Path) -> None:
    write(tmp_path, "base/one.yaml", "a: {x: 1, y: 1}\nlist: [1, 2]\nz: ${mul:${a.x}, 10}")
    write(tmp_path, "base/two.yaml", "defaults: one.yaml\na: {y: 2}")
    write(tmp_path, "three.yaml", "a: {w: 3}\nlist: [3]")
    path = write(tmp_path, "child.yaml", "defaults: [base/two.yaml, three.yaml]\na: {x: 4}")
    assert legacy_yaml.read(path) == {"a": {"x": 4, "y": 2, "w": 3}, "list": [3], "z": 40}


def test_a_marked_mapping_replaces_its_parents(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "a: {x: 1, inner: {y: 1}}")
    path = write(tmp_path, "child.yaml", "defaults: base.yaml\na: {inner: {_override_: true, z: 2}}")
    assert legacy_yaml.read(path) == {"a": {"x": 1, "inner": {"z": 2}}}


def test_the_functions_of_interpolations_are_gone_afterwards(tmp_path: Path) -> None:
    legacy_yaml.read(write(tmp_path, "old.yaml", "a: ${max:1, 3}\nb: ${div:${a}, 2}\nc: ${add:1, 2}"))
    assert not OmegaConf.has_resolver("mul")


def test_an_environment_variable_that_is_not_set_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IS_SET", "here")
    path = write(tmp_path, "old.yaml", "a: ${oc.env:IS_NOT_SET}/x\nb: ${oc.env:IS_SET}\nc: ${oc.env:IS_NOT_SET, y}")
    assert legacy_yaml.read(path) == {"a": "$IS_NOT_SET/x", "b": "here", "c": "y"}


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ({"old.yaml": "defaults: absent.yaml"}, ["absent.yaml", "old.yaml"]),
        ({"old.yaml": "defaults: b.yaml", "b.yaml": "defaults: old.yaml"}, ["old.yaml", "b.yaml"]),
        ({"old.yaml": "x: {a: '${b.c}'}"}, ["old.yaml", "b.c", "x.a"]),
        ({"old.yaml": "x: {a: '${div:1, 0}'}"}, ["old.yaml", "x.a"]),
        ({"old.yaml": "- 1"}, ["old.yaml"]),
        ({"old.yaml": "a: [1"}, ["old.yaml"]),
        ({"old.yaml": "defaults: 3"}, ["old.yaml", 3]),
        ({"old.yaml": "defaults: [{a: b}]"}, ["old.yaml"]),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str], facts: list[Any], raises: Raises) -> None:
    for name, text in files.items():
        write(tmp_path, name, text)
    with raises(DataError, *facts):
        legacy_yaml.read(tmp_path / "old.yaml")


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"actor_rollout_ref": {"actor": {}, "rollout": {}}, "trainer": {"nnodes": 1}}, "verl"),
        ({"model_name_or_path": "x", "learning_rate": 1.0, "use_vllm": True}, "TRL"),
        ({"algorithm": "grpo", "policy": {"backend": "dtensor"}}, "nemorl"),
        ({"gpro": {}, "policy": {}}, "gpro"),
        ({}, "grpo"),
    ],
)
def test_a_config_of_another_system_is_told(config: dict[str, Any], fact: str, raises: Raises) -> None:
    with raises(UsageError, fact):
        migrate(config)


def test_the_command_refuses_writes_and_lists(nemorl: Command, tmp_path: Path) -> None:
    old, new = write(tmp_path, "old.yaml", DPO), tmp_path / "new.yaml"
    refused = nemorl("config", "migrate", old, "-o", new)
    assert refused.code == 2
    assert "not supported: another optimizer than AdamW (policy.optimizer.name = torch.optim.SGD)" in refused.err
    assert "unknown key my_own.answer = 42" in refused.err
    assert "--allow-loss" in refused.err
    assert not new.exists()
    allowed = ("--allow-loss", "policy.optimizer.name", "--allow-loss", "my_*")
    done = nemorl("config", "migrate", old, "-o", new, *allowed, "--report")
    assert done.code == 0, done.err
    assert yaml.safe_load(new.read_text())["algorithm"] == "dpo"
    assert "dpo.reference_policy_kl_penalty = 0.1" in done.out
    report = nemorl("config", "migrate", old, "--json").json
    assert set(report) == {"complete", "config", "missing", "keys", "problems"}
    assert nemorl("config", "migrate", tmp_path / "absent.yaml").code == 2


def test_a_config_that_holds_a_secret_is_not_written(nemorl: Command, tmp_path: Path) -> None:
    server = "logger: {mlflow_enabled: true, mlflow: {tracking_uri: 'https://me:hunter2@tracking.example.org'}}"
    old, new = write(tmp_path, "old.yaml", f"defaults: base.yaml\n{server}"), tmp_path / "new.yaml"
    write(tmp_path, "base.yaml", SFT)
    refused = nemorl("config", "migrate", old, "-o", new, "--report")
    assert (refused.code, new.exists()) == (2, False)
    assert "tracking_uri: holds a" in refused.err
    assert "hunter2" not in refused.out + refused.err
    assert "hunter2" not in nemorl("config", "migrate", old, "--json").out


def test_the_command_walks_a_tree(nemorl: Command, tmp_path: Path) -> None:
    write(tmp_path, "tree/good.yaml", SFT)
    write(tmp_path, "tree/deep/child.yaml", "defaults: ../good.yaml\nsft: {max_num_steps: 7}")
    write(tmp_path, "tree/deep/bad.yaml", DPO)
    write(tmp_path, "tree/fragment.yaml", "quantize: {algorithm: max}")
    done = nemorl("config", "migrate", tmp_path / "tree", "-o", tmp_path / "out", "--json")
    assert done.code == 1
    assert {entry["file"]: entry["result"] for entry in done.json} == {
        "deep/bad.yaml": "missing feature",
        "deep/child.yaml": "loads",
        "fragment.yaml": "fragment",
        "good.yaml": "loads",
    }
    assert yaml.safe_load((tmp_path / "out/deep/child.yaml").read_text())["max_steps"] == 7
