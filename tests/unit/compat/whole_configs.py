"""A whole config in NeMo RL's schema for each family, that migrates without loss; written for these tests."""

from __future__ import annotations

import json
from typing import Any

DTENSOR: dict[str, Any] = {
    "enabled": True,
    "tensor_parallel_size": 1,
    "sequence_parallel": False,
    "activation_checkpointing": False,
    "context_parallel_size": 1,
    "cpu_offload": False,
    "lora_cfg": {"enabled": False, "dim": 8, "alpha": 32, "dropout": 0.0},
}
OPTIMIZER: dict[str, Any] = {
    "name": "torch.optim.AdamW",
    "kwargs": {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
}
RUN: dict[str, Any] = {
    "checkpointing": {
        "enabled": True,
        "checkpoint_dir": "results/here",
        "higher_is_better": True,
        "keep_top_k": 3,
        "save_period": 25,
    },
    "logger": {"log_dir": "logs", "wandb_enabled": False, "tensorboard_enabled": False, "monitor_gpus": False},
    "cluster": {"gpus_per_node": 1, "num_nodes": 1},
}
POLICY: dict[str, Any] = {
    "model_name": "org/model",
    "train_global_batch_size": 32,
    "train_micro_batch_size": 4,
    "max_total_sequence_length": 512,
    "precision": "bfloat16",
    "max_grad_norm": 1.0,
    "dtensor_cfg": DTENSOR,
    "megatron_cfg": {"enabled": False},
    "optimizer": OPTIMIZER,
    "scheduler": None,
}
GENERATION: dict[str, Any] = {
    "backend": "vllm",
    "max_new_tokens": 256,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_strings": None,
    "stop_token_ids": None,
    "vllm_cfg": {"tensor_parallel_size": 1, "max_model_len": 512, "enforce_eager": False},
    "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
}
RESPONSES: dict[str, Any] = {
    "max_input_seq_length": 512,
    "shuffle": True,
    "train": {"dataset_name": "OpenMathInstruct-2", "split": "train_1M", "split_validation_size": 0.05, "seed": 42},
    "validation": None,
    "default": {"prompt_file": "prompts/cot.txt", "system_prompt_file": None, "env_name": "math"},
}
SAMPLING: dict[str, Any] = {
    "num_prompts_per_step": 8,
    "num_generations_per_prompt": 4,
    "max_rollout_turns": 1,
    "max_num_epochs": 2,
    "max_num_steps": 200,
    "val_period": 20,
    "val_at_start": False,
    "val_at_end": False,
    "max_val_samples": 256,
    "val_batch_size": 256,
    "seed": 42,
}
ENVIRONMENT: dict[str, Any] = {"math": {"num_workers": 8}}

GRPO = {
    "grpo": {**SAMPLING, "adv_estimator": {"name": "grpo", "use_leave_one_out_baseline": True}},
    "loss_fn": {"reference_policy_kl_penalty": 0.02, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2},
    "policy": {**POLICY, "generation": GENERATION},
    "data": RESPONSES,
    "env": ENVIRONMENT,
    **RUN,
}
JANUARY = {**GRPO, "data": {"dataset_name": "OpenMathInstruct-2", "prompt_file": "prompts/cot.txt", "shuffle": True}}
MEGATRON_SETTINGS = {
    "enabled": True,
    "activation_checkpointing": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "optimizer": {
        **{"optimizer": "adam", "lr": 5e-6, "min_lr": 5e-7, "weight_decay": 0.01, "clip_grad": 1.0},
        "use_distributed_optimizer": True,
    },
    "scheduler": {"lr_decay_style": "constant", "lr_decay_iters": 100, "lr_warmup_iters": 0, "lr_warmup_init": 0},
}
MEGATRON = {
    **GRPO,
    "policy": {
        **POLICY,
        "optimizer": None,
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": MEGATRON_SETTINGS,
        "generation": GENERATION,
    },
    "cluster": {"gpus_per_node": 8, "num_nodes": 1},
}
SFT = {
    "sft": {
        "max_num_epochs": 1,
        "max_num_steps": 60,
        "val_period": 10,
        "val_batches": 8,
        "val_global_batch_size": 32,
        "val_micro_batch_size": 1,
        "val_at_start": True,
        "val_at_end": False,
        "seed": 42,
        "only_unmask_final": False,
    },
    "policy": POLICY,
    "data": {
        "max_input_seq_length": 512,
        "shuffle": True,
        "train": {"dataset_name": "ResponseDataset", "data_path": "train.jsonl", "input_key": "question"},
        "validation": {"dataset_name": "ResponseDataset", "data_path": "held_out.jsonl"},
        "default": {"output_key": "solution"},
    },
    **RUN,
}
PAIRS = {
    "max_input_seq_length": 512,
    "shuffle": True,
    "train": {"dataset_name": "BinaryPreferenceDataset", "data_path": "pairs.jsonl"},
    "validation": {"dataset_name": "BinaryPreferenceDataset", "data_path": "held_out_pairs.jsonl"},
}
_PAIR_LOOP = {
    key: value
    for key, value in SFT["sft"].items()
    if key != "only_unmask_final"  # type: ignore[attr-defined]
}
DPO = {"dpo": {**_PAIR_LOOP, "reference_policy_kl_penalty": 0.1}, "policy": POLICY, "data": PAIRS, **RUN}
RM = {
    "rm": _PAIR_LOOP,
    "policy": {**POLICY, "reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"}},
    "data": PAIRS,
    **RUN,
}
PPO = {
    "ppo": {**SAMPLING, "ppo_epochs": 4, "adv_estimator": {"name": "gae", "gae_lambda": 0.95, "gae_gamma": 1.0}},
    "loss_fn": {"reference_policy_kl_penalty": 0.02, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2},
    "value_loss_fn": {"scale": 1.0, "cliprange": 0.2},
    "policy": {**POLICY, "generation": GENERATION},
    "value": {
        "model_name": "org/model",
        "precision": "bfloat16",
        "max_grad_norm": 1.0,
        "max_total_sequence_length": 512,
        "dtensor_cfg": DTENSOR,
        "megatron_cfg": {"enabled": False},
        "optimizer": OPTIMIZER,
        "scheduler": None,
        "reward_model_cfg": {"enabled": True, "reward_model_type": "regression"},
    },
    "data": RESPONSES,
    "env": ENVIRONMENT,
    **RUN,
}
DISTILLATION = {
    "distillation": {**SAMPLING, "topk_logits_k": 64},
    "loss_fn": {"kl_type": "mixed", "mixed_kl_weight": 0.5, "zero_outside_topk": False},
    "policy": {**POLICY, "generation": GENERATION},
    "teacher": {
        **POLICY,
        "model_name": "org/teacher",
    },
    "data": RESPONSES,
    "env": ENVIRONMENT,
    **RUN,
}
EVAL = {
    "eval": {"metric": "pass@k", "num_tests_per_prompt": 1, "seed": 42, "k_value": 1, "save_path": None},
    "generation": {
        **GENERATION,
        "model_name": "org/model",
        "temperature": 0.0,
        "top_k": -1,
        "num_prompts_per_step": -1,
        "vllm_cfg": {"tensor_parallel_size": 1, "precision": "bfloat16", "max_model_len": 512},
    },
    "tokenizer": {"name": "org/model", "chat_template": "default"},
    "data": {"dataset_name": "AIME2024", "prompt_file": None, "processor": "math_hf_data_processor", "repeat": 1},
    "env": ENVIRONMENT,
    "cluster": RUN["cluster"],
}
WHOLE: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "january": JANUARY,
    "megatron": MEGATRON,
    "sft": SFT,
    "dpo": DPO,
    "rm": RM,
    "ppo": PPO,
    "distillation": DISTILLATION,
    "eval": EVAL,
}
PROMPTS = {"cot.txt": "Think first.\n\n{}", "other.txt": "Other {}", "system.txt": "You are terse."}


def whole(name: str) -> dict[str, Any]:
    """A config of one's own to change, no part of which stands in two places."""
    found: dict[str, Any] = json.loads(json.dumps(WHOLE[name]))
    return found


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its dotted path."""
    *parents, last = path.split(".")
    for key in parents:
        below = config.get(key)
        config[key] = config = below if isinstance(below, dict) else {}
    config[last] = value


def remove(config: dict[str, Any], path: str) -> None:
    """Take out what is at a dotted path, if it is there."""
    *parents, last = path.split(".")
    for key in parents:
        config = config.get(key, {})
    config.pop(last, None)
