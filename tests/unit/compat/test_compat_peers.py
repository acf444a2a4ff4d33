"""Configs of TRL, verl and OpenRLHF as configs of nemorl: values, refusals, and every key accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from every_option import OPENRLHF
from nemorl.config import load_config
from nemorl.errors import DataError, UsageError
from nemorl_compat.command import app
from nemorl_compat.migration import Migration
from nemorl_compat.migration_report import refusal
from nemorl_compat.peers.reading import Given, read
from nemorl_compat.peers.tables import SYSTEMS, table
from nemorl_compat.peers.translation import translate
from recorded_messages import Raises
from typer.testing import CliRunner

TRL_GRPO = {"model_name_or_path": "org/model", "num_generations": 8, "num_processes": 1}
TRL_SFT = {"model_name_or_path": "org/model", "packing": False, "num_processes": 2}
TRL_DPO = {"model_name_or_path": "org/model", "beta": 0.1, "num_processes": 1}
TRL_KTO = {"model_name_or_path": "org/model", "desirable_weight": 1.0, "num_processes": 1}
TRL_CPO = {"model_name_or_path": "org/model", "loss_type": "simpo", "simpo_gamma": 0.5, "num_processes": 1}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = {
    "actor_rollout_ref.model.path": "org/model",
    "algorithm.adv_estimator": "grpo",
    f"{ROLLOUT}.n": 5,
    f"{ROLLOUT}.name": "vllm",
}
SAMPLED = {**VERL, f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.temperature": 0.6}
BASES = {"trl": TRL_GRPO, "verl": VERL, "openrlhf": OPENRLHF}


def translated(system: str, base: dict[str, Any], family: str | None = None, **options: Any) -> Migration:
    return translate(Given(system, dict(base), family), **options)


def loaded(migration: Migration) -> Any:
    assert migration.is_complete, migration.features
    return load_config(migration.config, for_cluster=True)


def at(config: Any, path: str) -> Any:
    found: Any = config.model_dump(mode="json")
    for key in path.split("."):
        found = found[key]
    return found


# Defaults of the other system, where they are not nemorl's


@pytest.mark.slow
def test_a_bare_trl_config_has_trls_defaults() -> None:
    config = loaded(translated("trl", TRL_GRPO))
    # 8 responses per device are one group of 8; TRL's optimizer, schedule, epochs and KL.
    assert (config.num_prompts_per_step, config.num_generations_per_prompt, config.num_minibatches) == (1, 8, 1)
    assert (config.policy.optimizer.weight_decay, config.policy.schedule.kind) == (0.0, "linear")
    assert (config.max_epochs, config.kl_penalty, config.generation.max_new_tokens) == (3, 0.0, 512)
    assert (config.advantage.flavour, config.std_epsilon, config.loss.flavour) == ("trl", 1e-4, "trl")


def test_trls_batches_become_prompts_and_minibatches() -> None:
    # 4 devices * 8 responses * 6 per generation = 192 responses = 24 groups of 8; an update takes 4 * 8 * 2 = 64.
    sizes = {"num_processes": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    config = loaded(translated("trl", {**TRL_GRPO, **sizes, "steps_per_generation": 6, "max_steps": 30}))
    assert (config.num_prompts_per_step, config.num_minibatches) == (24, 3)
    # TRL's steps are updates: 30 of them are 10 steps of 3.
    assert (config.max_steps, config.cluster.gpus_per_node) == (10, 4)
    # 2 processes * 8 rows * 4
    assert loaded(translated("trl", {**TRL_SFT, "gradient_accumulation_steps": 4})).batch_size == 64


def test_a_bare_verl_config_has_verls_defaults() -> None:
    config = loaded(translated("verl", VERL))
    # 1024 prompts in minibatches of 256; prompts and responses of 512 tokens each.
    assert (config.num_prompts_per_step, config.num_minibatches, config.policy.max_sequence_tokens) == (1024, 4, 1024)
    assert (config.dual_clip, config.kl_penalty, config.kl_gradient) == (3.0, 0.0, "estimator")
    assert (config.cluster.gpus_per_node, config.max_epochs, config.validation.at_start) == (8, 30, True)


def test_a_bare_openrlhf_command_has_openrlhfs_defaults() -> None:
    config = loaded(translated("openrlhf", OPENRLHF))
    # 1024 prompts * 8 responses in updates of 128.
    assert (config.num_prompts_per_step, config.num_minibatches) == (1024, 64)
    assert (config.std_epsilon, config.kl_penalty, config.kl_output_clamp) == (1e-9, 0.01, 10.0)
    assert (config.policy.optimizer.betas, config.policy.schedule.min_lr_frac) == ((0.9, 0.95), 0.1)


def test_openrlhfs_lengths_before_and_since_2026() -> None:
    older = loaded(translated("openrlhf", {**OPENRLHF, "prompt_max_len": 512, "generate_max_len": 1024}))
    assert (older.policy.max_sequence_tokens, older.generation.max_new_tokens) == (1536, 1024)
    newer = loaded(translated("openrlhf", {**OPENRLHF, "max_len": 2048}))
    assert (newer.policy.max_sequence_tokens, newer.generation.max_new_tokens) == (2048, 2047)


# Every mapped key is proven by another value of it

CHANGES = [
    ("trl", TRL_GRPO, "learning_rate", 3e-6, "policy.optimizer.lr", 3e-6),
    ("trl", TRL_GRPO, "num_generations", 4, "num_prompts_per_step", 2),
    ("trl", TRL_GRPO, "num_iterations", 2, "num_epochs_per_rollout", 2),
    ("trl", TRL_GRPO, "beta", 0.04, "kl_penalty", 0.04),
    ("trl", TRL_GRPO, "epsilon", 0.1, "clip_high", 0.1),
    ("trl", TRL_GRPO, "epsilon_high", 0.28, "clip_high", 0.28),
    ("trl", TRL_GRPO, "delta", 4.0, "dual_clip", 4.0),
    ("trl", TRL_GRPO, "loss_type", "grpo", "loss_aggregation", "sequence"),
    ("trl", TRL_GRPO, "scale_rewards", "none", "normalize_std", False),
    ("trl", TRL_GRPO, "use_bias_correction_kl", False, "kl_gradient", "estimator"),
    ("trl", TRL_GRPO, "mask_truncated_completions", True, "overlong_filtering", True),
    ("trl", TRL_GRPO, "temperature", 0.7, "generation.temperature", 0.7),
    ("trl", TRL_GRPO, "top_k", 50, "generation.top_k", 50),
    ("trl", TRL_GRPO, "max_completion_length", 99, "generation.max_new_tokens", 99),
    ("trl", TRL_GRPO, "warmup_steps", 7, "policy.schedule.warmup_steps", 7),
    ("trl", TRL_GRPO, "lr_scheduler_type", "cosine", "policy.schedule.kind", "cosine"),
    ("trl", TRL_GRPO, "bf16", False, "policy.precision", "float32"),
    ("trl", TRL_GRPO, "save_steps", 40, "checkpoint.every", 40),
    ("trl", TRL_GRPO, "save_total_limit", 3, "checkpoint.keep_last", 3),
    ("trl", TRL_GRPO, "use_peft", True, "policy.lora.rank", 16),
    ("trl", TRL_GRPO, "reward_funcs", "accuracy_reward", "environment.name", "math"),
    ("trl", TRL_SFT, "max_length", 300, "policy.max_sequence_tokens", 300),
    ("trl", TRL_DPO, "beta", 0.3, "beta", 0.3),
    ("trl", TRL_KTO, "beta", 0.3, "beta", 0.3),
    ("trl", TRL_KTO, "desirable_weight", 1.3, "desirable_weight", 1.3),
    ("trl", TRL_KTO, "train_sampling_strategy", "random", "shuffle", True),
    ("trl", TRL_CPO, "simpo_gamma", 1.0, "gamma", 1.0),
    ("trl", TRL_CPO, "cpo_alpha", 0.0, "sft_loss_weight", 0.0),
    ("trl", TRL_CPO, "label_smoothing", 0.1, "label_smoothing", 0.1),
    ("trl", TRL_DPO, "loss_type", "ipo", "loss", "ipo"),
    ("trl", TRL_DPO, "label_smoothing", 0.1, "label_smoothing", 0.1),
    ("verl", VERL, "data.train_batch_size", 512, "num_minibatches", 2),
    ("verl", VERL, f"{ROLLOUT}.n", 16, "num_generations_per_prompt", 16),
    ("verl", VERL, f"{ROLLOUT}.gpu_memory_utilization", 0.7, "generation.backend.gpu_memory_utilization", 0.7),
    ("verl", VERL, f"{ACTOR}.ppo_epochs", 2, "num_epochs_per_rollout", 2),
    ("verl", VERL, f"{ACTOR}.clip_ratio_high", 0.28, "clip_high", 0.28),
    ("verl", VERL, f"{ACTOR}.loss_agg_mode", "seq-mean-token-sum", "loss_aggregation", "sequence_sum"),
    ("verl", VERL, f"{ACTOR}.use_kl_loss", True, "kl_penalty", 0.001),
    ("verl", VERL, f"{ACTOR}.optim.lr", 2e-6, "policy.optimizer.lr", 2e-6),
    ("verl", VERL, f"{ACTOR}.optim.lr_warmup_steps", 10, "policy.schedule.warmup_steps", 10),
    ("verl", VERL, f"{ACTOR}.tis_imp_ratio_cap", 2, "importance_correction.cap", 2.0),
    ("verl", VERL, "algorithm.norm_adv_by_std_in_grpo", False, "normalize_std", False),
    ("verl", VERL, "algorithm.filter_groups.enable", True, "dynamic_sampling", True),
    ("verl", VERL, "algorithm.adv_estimator", "rloo", "algorithm", "rloo"),
    ("verl", VERL, f"{ACTOR}.policy_loss.loss_mode", "gspo", "algorithm", "gspo"),
    ("verl", VERL, "trainer.test_freq", 5, "validation.every", 5),
    ("verl", SAMPLED, f"{ROLLOUT}.val_kwargs.n", 4, "validation.num_generations", 4),
    ("verl", VERL, "trainer.nnodes", 2, "cluster.address", "auto"),
    ("openrlhf", OPENRLHF, "actor_learning_rate", 3e-7, "policy.optimizer.lr", 3e-7),
    ("openrlhf", OPENRLHF, "rollout_batch_size", 64, "num_minibatches", 4),
    ("openrlhf", OPENRLHF, "eps_clip_low_high", [0.2, 0.27], "clip_high", 0.27),
    ("openrlhf", OPENRLHF, "init_kl_coef", 0.002, "kl_penalty", 0.002),
    ("openrlhf", OPENRLHF, "kl_estimator", "k2", "kl_type", "k2"),
    ("openrlhf", OPENRLHF, "advantage_estimator", "dr_grpo", "normalize_std", False),
    ("openrlhf", OPENRLHF, "reward_pretrain", "org/judge", "environment.model", "org/judge"),
    ("openrlhf", OPENRLHF, "dynamic_filtering", True, "dynamic_sampling", True),
    ("openrlhf", OPENRLHF, "max_norm", 0.5, "policy.max_grad_norm", 0.5),
]


@pytest.mark.parametrize(("system", "base", "key", "value", "path", "expected"), CHANGES)
def test_another_value_of_a_key_shows_in_the_resolved_config(
    system: str, base: dict[str, Any], key: str, value: Any, path: str, expected: Any
) -> None:
    changed = translated(system, {**base, key: value})
    assert at(loaded(changed), path) == pytest.approx(expected)
    assert [change.outcome.kind for change in changed.changes if change.key == key] == ["mapped"]


def test_several_files_are_a_mixture() -> None:
    files = {"data.train_files": ["a.parquet", "b.parquet"], "data.val_files": "c.parquet"}
    config = translated("verl", {**VERL, **files}).config
    parts = [{"data": {"name": "file", "path": path, "prompt_column": "prompt"}} for path in ("a.parquet", "b.parquet")]
    assert config["data"] == {"name": "mixture", "parts": parts}
    assert config["validation"]["data"]["path"] == "c.parquet"
    weighted = {"prompt_data": "org/a,org/b", "prompt_data_probs": "0.25,0.75"}
    found = translated("openrlhf", {**OPENRLHF, **weighted}).config["data"]["parts"]
    assert [(part["data"]["path"], part["weight"]) for part in found] == [("org/a", 0.25), ("org/b", 0.75)]


def test_arguments_of_the_chat_template_and_of_the_models_config_keep_their_names() -> None:
    keys = {"data.apply_chat_template_kwargs.enable_thinking": False}
    keys |= {"actor_rollout_ref.model.override_config.max_position_embeddings": 32768}
    config = loaded(translated("verl", {**VERL, **keys}))
    assert config.policy.tokenizer.chat_template_kwargs == {"enable_thinking": False}
    assert config.policy.hf_config_overrides == {"max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, {"algorithm": "sapo", "tau_negative": 1.2}),
        ({"loss_type": "vespo", "vespo_k_pos": 1.5}, {"algorithm": "vespo", "k_positive": 1.5, "lambda_negative": 2.0}),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"algorithm": "luspo", "clip_low": 0.2}),
        ({"entropy_coef": 0.01, "top_entropy_quantile": 0.2}, {"entropy_bonus": 0.01, "high_entropy_frac": 0.2}),
        ({"off_policy_mask_threshold": 0.5}, {"off_policy_mask": 0.5}),
    ],
)
def test_newer_losses_and_masks_of_trl_keep_their_knobs(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    config = loaded(translated("trl", {**TRL_GRPO, **keys}))
    assert {name: getattr(config, name) for name in expected} == expected


# Refusals

LOSSES = [
    ("trl", TRL_GRPO, "use_adaptive_entropy", True),
    ("trl", TRL_GRPO, "loss_type", "luspo"),
    ("trl", TRL_GRPO, "scale_rewards", "batch"),
    ("trl", TRL_GRPO, "reward_funcs", ["my.reward"]),
    ("trl", TRL_SFT, "num_train_epochs", 0.5),
    ("trl", TRL_DPO, "loss_type", "sppo_hard"),
    ("trl", TRL_KTO, "loss_type", "apo_zero_unpaired"),
    ("trl", TRL_CPO, "loss_type", "sigmoid"),
    ("trl", TRL_CPO, "alpha", 0.5),
    ("verl", VERL, "algorithm.adv_estimator", "gae"),
    ("verl", VERL, f"{ROLLOUT}.name", "sglang"),
    ("verl", VERL, "custom_reward_function.path", "reward.py"),
    ("verl", VERL, "algorithm.use_kl_in_reward", True),
    ("openrlhf", OPENRLHF, "normalize_reward", True),
    ("openrlhf", OPENRLHF, "remote_rm_url", "reward.py"),
]


@pytest.mark.parametrize(("system", "base", "key", "value"), LOSSES)
def test_what_would_be_lost_is_refused_unless_it_may_be(
    system: str, base: dict[str, Any], key: str, value: Any, raises: Raises
) -> None:
    lossy = {**base, key: value}
    refused = translated(system, lossy)
    assert [change.key for change in refused.refused] == [key]
    assert len(refused.features) == 1
    with raises(UsageError, key):
        raise refusal(refused, "run")
    assert translated(system, lossy, allow_loss=[key]).refused == []


def test_sizes_that_do_not_divide_are_refused_where_they_stand() -> None:
    # 8 responses are no whole number of groups of 3.
    uneven = translated("trl", {**TRL_GRPO, "num_generations": 3, "per_device_train_batch_size": 8})
    assert [change.key for change in uneven.refused] == ["per_device_train_batch_size"]
    # OpenRLHF's KL goes into the reward, token by token, unless it is told otherwise.
    charged = translated("openrlhf", {**OPENRLHF, "use_kl_loss": False, "init_kl_coef": 0.01})
    assert [change.key for change in charged.refused] == ["init_kl_coef"]


@pytest.mark.parametrize(
    ("system", "base", "given", "tokens"),
    [
        ("trl", TRL_SFT, {"per_device_train_batch_size": 4, "max_length": 512}, 2048),
        ("trl", TRL_SFT, {}, None),
        ("verl", VERL, {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2}, 2 * (512 + 512)),
        (
            "verl",
            VERL,
            {
                "actor_rollout_ref.actor.use_dynamic_bsz": True,
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 24000,
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
            },
            24000,
        ),
        ("openrlhf", OPENRLHF, {"micro_train_batch_size": 2, "prompt_max_len": 100, "generate_max_len": 200}, 600),
    ],
)
def test_microbatches_are_as_large_as_they_were(
    system: str, base: dict[str, Any], given: dict[str, Any], tokens: int | None
) -> None:
    assert loaded(translated(system, {**base, **given})).policy.microbatch_tokens == tokens


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_that_nobody_knows_is_refused(system: str) -> None:
    refused = translated(system, {**BASES[system], "no_such_key_at_all": 1})
    assert refused.features == ["the unknown key no_such_key_at_all"]


FULL: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "trl": [
        (
            "grpo",
            {
                **TRL_GRPO,
                **dict.fromkeys(("use_vllm", "use_peft"), True),
                "beta": 0.1,
                "dataset_name": "org/rows",
                "eval_strategy": "steps",
                "report_to": "wandb",
                "lr_scheduler_type": "cosine_with_min_lr",
                "max_steps": 200,
            },
        ),
        ("sft", {**TRL_SFT, "dataset_name": "org/rows"}),
        ("dpo", {**TRL_DPO, "dataset_name": "org/rows"}),
        ("kto", {**TRL_KTO, "dataset_name": "org/rows"}),
        ("cpo", {**TRL_CPO, "dataset_name": "org/rows"}),
        ("orpo", {**TRL_DPO, "dataset_name": "org/rows"}),
    ],
    "verl": [
        (
            "grpo",
            {
                **VERL,
                "actor_rollout_ref.model.lora_rank": 8,
                "data.train_files": "a.parquet",
                "algorithm.filter_groups.enable": True,
                "reward_model.reward_manager": "dapo",
                "reward_model.overlong_buffer.enable": enable,
                "reward_model.reward_kwargs.overlong_buffer_cfg.enable": not enable,
                f"{ACTOR}.use_kl_loss": True,
                f"{ACTOR}.optim.warmup_style": "cosine",
                f"{ROLLOUT}.val_kwargs.do_sample": True,
                "algorithm.rollout_correction.rollout_is": correction,
            },
        )
        for enable, correction in ((True, "token"), (False, None))
    ],
    "openrlhf": [
        (
            "grpo",
            {
                **OPENRLHF,
                "colocate_all_models": colocated,
                "kl_estimator": "k2",
                "lora_rank": 8,
                "prompt_data": "org/rows",
                "eval_dataset": "org/others",
                "eval_steps": 5,
                "overlong_buffer_len": 10,
                **dict.fromkeys(("use_wandb", "enable_vllm_is_correction", "async_train"), True),
            },
        )
        for colocated in (True, False)
    ]
    + [(family, {"pretrain": "org/model", "dataset": "org/rows"}) for family in ("sft", "dpo")],
}
"""Configs in which as much as possible is turned on, so that every knob can do something."""
TRIALS = [
    "fp16",
    *(0.37, 1, 3, 64, True, False, "cosine", "none", "tensorboard", ["a", "b"], "x/y", "steps", "bfloat16", "sdpa"),
    *(
        "ipo",
        "wandb",
        "gspo",
        "token",
        "k2",
        "dapo",
        [0.1, 0.9],
        "icepop",
        "sequence",
        "megatron",
        {"min_lr_rate": 0.2},
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_key_that_a_part_reads_can_change_without_a_trace(system: str) -> None:
    def outcome(family: str, config: dict[str, Any]) -> tuple[Any, ...]:
        made = translated(system, config, family)
        return made.config, [(c.key, c.outcome) for c in made.changes if c.outcome.kind != "mapped"]

    def shows(key: str, only: tuple[str, ...]) -> bool:
        for family, config in FULL[system]:
            if only and family not in only:
                continue
            before = outcome(family, config)
            for trial in TRIALS:
                try:
                    if outcome(family, {**config, key: trial}) != before:
                        return True
                except (DataError, TypeError, ValueError):
                    continue  # no value for this key
        return False

    read_by_parts = [(key, entry.only) for entry in table(system).entries if "part" in entry.row for key in entry.keys]
    assert [key for key, only in read_by_parts if "*" not in key and not shows(key, only)] == []


# Files


def test_a_script_of_accelerate_and_trl_is_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\n# a comment --with options\nMODEL=org/model\n"
        "accelerate launch --num_processes 4 --config_file zero3.yaml \\\n"
        "  trl/scripts/dpo.py --model_name_or_path $MODEL --learning_rate 5.0e-7 \\\n"
        "  --use_peft --lora_r=32 --report_to wandb tensorboard\n"
    )
    given = read(script, "trl")
    assert given.family == "dpo"
    assert given.values == {
        "num_processes": 4,
        "model_name_or_path": "org/model",
        "learning_rate": 5e-7,
        "use_peft": True,
        "lora_r": 32,
        "report_to": ["wandb", "tensorboard"],
    }
    config = loaded(translate(given))
    assert (config.algorithm, config.policy.lora.rank, config.batch_size) == ("dpo", 32, 32)


def test_verls_overrides_and_its_yaml_say_the_same(tmp_path: Path) -> None:
    script, nested = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(
        "set -x\npython3 -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=grpo data.train_batch_size=64 \\\n"
        '  +actor_rollout_ref.rollout.n=8 trainer.logger=\'["console","wandb"]\' \\\n'
        "  data.train_files=$HOME/gsm8k/train.parquet $@\n"
    )
    nested.write_text(
        "algorithm: {adv_estimator: grpo}\ndata: {train_batch_size: 64, train_files: ~/gsm8k/train.parquet}\n"
        "actor_rollout_ref: {rollout: {n: '${samples}'}}\ntrainer: {logger: [console, wandb]}\nsamples: 8\n"
    )
    assert read(script, "verl").values == {k: v for k, v in read(nested, "verl").values.items() if k != "samples"}


def test_a_command_of_openrlhf_under_ray_is_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\\n'
        "  --pretrain org/model --init_kl_coef 1e-3 --eps_clip_low_high 0.2 0.3 --bf16\n"
    )
    given = read(script, "openrlhf")
    assert given.family == "grpo"
    assert given.values == {
        "pretrain": "org/model",
        "init_kl_coef": 1e-3,
        "eps_clip_low_high": [0.2, 0.3],
        "bf16": True,
    }


def test_openrlhfs_names_since_2026_mean_what_the_older_ones_did(tmp_path: Path) -> None:
    older, newer = tmp_path / "older.sh", tmp_path / "newer.sh"
    older.write_text("deepspeed --module openrlhf.cli.train_sft --pretrain org/model --lora_rank 8 --l2 0.1\n")
    newer.write_text(
        "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path org/model --ds.lora.rank 8 "
        "--adam.weight_decay 0.1\n"
    )
    assert read(older, "openrlhf").values == read(newer, "openrlhf").values


def test_a_shells_arithmetic_is_computed(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "size=${SIZE:-64}  # prompts\nlength=$((1024 * 2))\n"
        "python3 -m verl.trainer.main_ppo data.train_batch_size=$((size / 2)) data.max_response_length=${length}\n"
    )
    assert read(script, "verl").values == {"data.train_batch_size": 32, "data.max_response_length": 2048}


def test_json_of_training_arguments_is_read(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps(TRL_GRPO))
    assert read(path, "trl").values == TRL_GRPO


def test_what_cannot_be_read_says_so(tmp_path: Path, raises: Raises) -> None:
    script = tmp_path / "run.sh"
    script.write_text("echo nothing\n")
    with raises(UsageError, "verl"):
        read(script, "verl")
    script.write_text("python -m openrlhf.cli.train_rm --pretrain org/model\n")
    with raises(UsageError, "rm"):
        read(script, "openrlhf")
    with raises(UsageError, "--algorithm"):
        translated("trl", {"model_name_or_path": "org/model"})
    with raises(DataError, "learning_rate", "fast"):
        translated("trl", {**TRL_GRPO, "learning_rate": "fast"})


def test_the_command_writes_a_config_that_loads_or_exits_with_the_reason(tmp_path: Path) -> None:
    script, output = tmp_path / "run.sh", tmp_path / "run.yaml"
    command = ["--from", "verl", str(script), "-o", str(output)]
    script.write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae\n")
    assert CliRunner().invoke(app, command).exit_code != 0
    assert not output.exists()
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=org/model "
        "actor_rollout_ref.rollout.n=8\n"
    )
    assert CliRunner().invoke(app, command).exit_code == 0
    assert load_config(output, for_cluster=True).num_generations_per_prompt == 8  # type: ignore[attr-defined]
