"""What the keys of old configs mean: those that only have another name, those that nemorl needs no longer, and a reader
that knows which ones nobody has asked for.

Keys whose translation takes more than a new name are in ``migration_parts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

LOOP = {
    "max_num_steps": "max_steps",
    "max_num_epochs": "max_epochs",
    "val_period": "validation.every",
    "val_at_start": "validation.at_start",
    "val_at_end": "validation.at_end",
    "seed": "seed",
}
"""Of the algorithm's own section."""

EVERY = {
    "policy.model_name": "model",
    "policy.max_total_sequence_length": "policy.max_sequence_tokens",
    "policy.max_grad_norm": "policy.max_grad_norm",
    "checkpointing.checkpoint_dir": "run_dir",
    "checkpointing.keep_top_k": "checkpoint.keep_best",
    "cluster.num_nodes": "cluster.num_nodes",
}

GENERATION = {
    f"policy.generation.{name}": f"generation.{name}"
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "stop_strings", "stop_token_ids")
}

BY_ALGORITHM: Mapping[str, Mapping[str, str]] = {
    "grpo": {
        **GENERATION,
        "grpo.num_prompts_per_step": "num_prompts_per_step",
        "grpo.num_generations_per_prompt": "num_generations_per_prompt",
        "grpo.max_rollout_turns": "max_turns",
        "grpo.normalize_rewards": "normalize_std",
        "grpo.use_leave_one_out_baseline": "leave_one_out",
        "grpo.adv_estimator.normalize_rewards": "normalize_std",
        "grpo.adv_estimator.use_leave_one_out_baseline": "leave_one_out",
        "grpo.adv_estimator.reward_weights": "reward_weights",
        "grpo.overlong_filtering": "overlong_filtering",
        "grpo.use_dynamic_sampling": "dynamic_sampling",
        "grpo.dynamic_sampling_max_gen_batches": "rollouts.max_batches_per_step",
        "grpo.advantage_clip_low": "advantage_clip_low",
        "grpo.advantage_clip_high": "advantage_clip_high",
        "grpo.max_val_samples": "validation.max_samples",
        "grpo.val_num_generations_per_prompt": "validation.num_generations",
        "loss_fn.reference_policy_kl_penalty": "kl_penalty",
        "loss_fn.ratio_clip_min": "clip_low",
        "loss_fn.ratio_clip_max": "clip_high",
        "loss_fn.ratio_clip_c": "dual_clip",
    },
    "sft": {"sft.only_unmask_final": "only_last_turn", "policy.train_global_batch_size": "batch_size"},
    "dpo": {
        "dpo.reference_policy_kl_penalty": "beta",
        "dpo.preference_loss_weight": "preference_loss_weight",
        "dpo.sft_loss_weight": "sft_loss_weight",
        "dpo.preference_average_log_probs": "preference_average_log_probs",
        "dpo.sft_average_log_probs": "sft_average_log_probs",
        "policy.train_global_batch_size": "batch_size",
    },
}
"""Old path -> new path, where the value stays what it is."""

SETTLED = (
    # How work is cut does not change results: nemorl cuts by tokens.
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "policy.logprob_chunk_size",
    "policy.generation_batch_size",
    "policy.make_sequence_length_divisible_by",
    "policy.dynamic_batching.*",
    "policy.sequence_packing.*",
    "policy.offload_optimizer_for_logprob",
    "policy.optimizer.kwargs.foreach",
    "policy.optimizer.kwargs.fused",
    "*.val_batch_size",
    "*.val_micro_batch_size",
    "grpo.calculate_advantages_on_gpu",
    "data.num_workers",
    # The backends' own affairs, or what follows from other settings.
    "policy.dtensor_cfg.enabled",
    "policy.dtensor_cfg._v2",
    "policy.megatron_cfg.empty_unused_memory_level",
    "policy.generation.colocated.enabled",
    "policy.generation.vllm_cfg.async_engine",
    "policy.generation.vllm_cfg.max_model_len",
    "policy.generation.vllm_cfg.precision",
    "data.max_input_seq_length",
    "data.env_name",
    "data.*.env_name",
    "data.processor",
    "data.*.processor",
    # What a run always has: its directory, samples, finite waits, whole checkpoints.
    "checkpointing.enabled",
    "checkpointing.model_save_format",
    "checkpointing.save_consolidated",
    "checkpointing.save_optimizer",
    "logger.log_dir",
    "logger.num_val_samples_to_print",
    "logger.monitor_gpus",
    "logger.gpu_monitoring.*",
)
"""Patterns of keys that have nothing to say to nemorl, whatever their value."""

OFF: Mapping[str, tuple[Any, ...]] = {
    "grpo.batch_multiplier": (1,),
    "grpo.seq_logprob_error_threshold": (None,),
    "grpo.val_start_at": (-1,),
    "grpo.stop_at_validation_*": (None,),
    "grpo.reward_shaping.enabled": (False,),
    "grpo.reward_scaling.enabled": (False,),
    "grpo.async_grpo.enabled": (False,),
    "grpo.async_grpo.in_flight_weight_updates": (False,),
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": (False,),
    "loss_fn.disable_ppo_ratio": (False,),
    "loss_fn.force_on_policy_ratio": (False,),
    "loss_fn.use_kl_in_reward": (False,),
    "loss_fn.positive_example_nll_weight": (0,),
    "policy.hf_config_overrides": ({}, None),
    "policy.tokenizer.chat_template_kwargs": (None, {}),
    "policy.dtensor_cfg.cpu_offload": (False,),
    "policy.dtensor_cfg.context_parallel_size": (1,),
    "policy.dtensor_cfg.expert_parallel_size": (1,),
    "policy.dtensor_cfg.custom_parallel_plan": (None,),
    "policy.dtensor_cfg.clear_cache_every_n_steps": (None,),
    "policy.dtensor_cfg.automodel_kwargs": ({}, None),
    "policy.dtensor_cfg.env_vars*": ("", {}, None),
    "policy.dtensor_cfg.lora_cfg.enabled": (False,),
    "policy.dtensor_cfg.lora_cfg.exclude_modules": ([], None),
    "policy.draft.enabled": (False,),
    "policy.reward_model_cfg.enabled": (False,),
    "policy.generation.vllm_cfg.pipeline_parallel_size": (1,),
    "policy.generation.vllm_cfg.expert_parallel_size": (1,),
    "policy.generation.vllm_cfg.kv_cache_dtype": ("auto",),
    "policy.generation.vllm_cfg.num_*_layers_in_bf16": (0,),
    "policy.generation.vllm_cfg.use_deep_gemm": (False,),
    "policy.generation.vllm_kwargs": ({}, None),
    "policy.generation.colocated.resources.*": (None,),
    "checkpointing.checkpoint_must_save_by": (None,),
    "data.shuffle": (True,),
    "data.add_*": (True,),
    "data.*prompt_file": (None,),
    "env.math.verifier_type": ("math",),
    "env.math.math_verify_impl": ("hf_math_verify",),
}
"""Patterns of keys, and the values with which they ask for nothing that nemorl does not do anyway."""


class Keys:
    """An old config that remembers which of its values were asked for."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._leaves = dict(_leaves(data))
        self._data = data
        self._used: set[str] = set()

    def take(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path, from now on translated with all below it; ``default`` where there is none."""
        found: Any = self._data
        for key in path.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        self.skip(path)
        return found

    def skip(self, *paths: str) -> None:
        """What is at these paths and below asks for nothing (the settings of something that is turned off)."""
        self._used |= {leaf for leaf in self._leaves if any(f"{leaf}.".startswith(f"{path}.") for path in paths)}

    def has(self, path: str) -> bool:
        return any(f"{leaf}.".startswith(f"{path}.") for leaf in self._leaves)

    def unmapped(self) -> dict[str, Any]:
        """Values that nobody has translated and that ask for something."""
        return {
            path: value
            for path, value in self._leaves.items()
            if path not in self._used and not _matches(path, SETTLED) and not _is_off(path, value)
        }


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, node


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _is_off(path: str, value: Any) -> bool:
    return any(fnmatchcase(path, pattern) and value in values for pattern, values in OFF.items())
