"""The sampling engine, whether it shares devices with training, and validation."""

from __future__ import annotations

from math import prod
from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.conversions.sight import samples_in_vllm
from nemorl_compat.key_table import judge
from nemorl_compat.old_config import OldConfig

WIDE_EXPERTS = "an engine whose experts spread over more GPUs than its layers, which are divided or on several nodes"
WIDE_ENGINE = "an engine over a part of a node beside whole ones"
SAMPLES = ("grpo", "ppo", "distillation", "eval")
VLLM_OPTIONS = {
    "vllm_cfg.tensor_parallel_size": "tensor_parallel_size",
    "vllm_cfg.pipeline_parallel_size": "pipeline_parallel_size",
    "vllm_cfg.gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_cfg.enforce_eager": "enforce_eager",
    "vllm_cfg.enable_prefix_caching": "prefix_caching",
    "vllm_kwargs.max_num_seqs": "max_num_seqs",
    "vllm_kwargs.enable_prefix_caching": "prefix_caching",
}
MTP_METHODS = ("mtp", "deepseek_mtp", "qwen3_next_mtp")
"""vLLM's names of speculation by a model's own MTP layers, of which it deprecates all but the first."""
CACHE_TYPE = "policy.generation.vllm_cfg.kv_cache_dtype"
ENGINE_ARGS = "generation.backend.engine_args"
NOT_IN_VLLM = "transformers samples: nemorl shows a model of this family nothing in vLLM"


def generation(old: OldConfig, new: Pieces) -> None:
    """The engine, its options and its place."""
    if old.family not in SAMPLES or not isinstance(old.get("policy.generation"), dict):
        return
    name = old.get("policy.generation.backend", "vllm")
    if name == "vllm" and not samples_in_vllm(old):
        name = "hf"
        new.differ("policy.generation.backend", NOT_IN_VLLM)
    new.put("generation.backend.name", name if name in ("megatron", "hf") else "vllm")
    if name == "vllm":
        _vllm(old, new)
    length = old.get("policy.max_total_sequence_length")
    longest = old.get("policy.generation.max_new_tokens")
    if isinstance(length, int) and isinstance(longest, int) and longest >= length:
        # The room that a prompt leaves is the limit, there and here; here the setting must leave some.
        longest = length - 1
    new.put_given("generation.max_new_tokens", longest)
    if old.family == "grpo":
        _filters(old, new)
    for option in ("stop_strings", "stop_token_ids"):
        new.put_given(f"generation.{option}", old.get(f"policy.generation.{option}"))
    _place(old, new)


def _filters(old: OldConfig, new: Pieces) -> None:
    """Sampling's filters of the vocabulary, which hold in training, too."""
    for name, nothing in {"top_p": (1, 1.0), "top_k": (-1,)}.items():
        value = old.get(f"policy.generation.{name}")
        if value is not None and value not in nothing:
            new.put(f"generation.{name}", value)
            new.put("filtered_logprobs", True)


def _vllm(old: OldConfig, new: Pieces) -> None:
    for theirs, ours in VLLM_OPTIONS.items():
        value = old.get(f"policy.generation.{theirs}")
        if not (ours == "enforce_eager" and value is False):  # unset, it is off on GPUs and on on CPUs
            new.put_given(f"generation.backend.{ours}", value)
    _experts(old, new)
    per_node = old.whole("cluster.gpus_per_node", 1, least=1)
    if _devices(new) > per_node and _devices(new) % per_node:
        new.miss("policy.generation.vllm_cfg.tensor_parallel_size", WIDE_ENGINE)
    if old.fp8_rollouts:
        _rounded(old, new)
    if str(old.get(CACHE_TYPE)).startswith("fp8"):
        new.put("generation.backend.cache_precision", "fp8")
        new.differ(CACHE_TYPE, "keys and values are rounded as they are: nothing is calibrated for a scale")
    _speculation(old, new)
    cache_bytes = old.get("policy.generation.vllm_kwargs.kv_cache_memory_bytes")
    if cache_bytes is not None:
        is_size = isinstance(cache_bytes, int | float)
        new.put("generation.backend.kv_cache_gib", cache_bytes / 2**30 if is_size else cache_bytes)
    given = old.get("policy.generation.vllm_kwargs")
    for name, value in given.items() if isinstance(given, dict) else ():
        target = judge(old, f"policy.generation.vllm_kwargs.{name}", value).to
        if target is not None and target.startswith(ENGINE_ARGS):
            new.put(f"{ENGINE_ARGS}.{name}", value)


def _rounded(old: OldConfig, new: Pieces) -> None:
    """Rollouts in 8 bits, and the layers that are left out."""
    options = "policy.generation.vllm_cfg"
    new.put("generation.backend.precision", "mxfp8" if old.get(f"{options}.is_mx") else "fp8")
    kept = {
        "first": old.get(f"{options}.num_first_layers_in_bf16"),
        "last": old.get(f"{options}.num_last_layers_in_bf16"),
        "names": old.get(f"{options}.quantization_ignored_layer_kws"),
    }
    for name, value in kept.items():
        if value:
            new.put(f"generation.backend.kept_layers.{name}", value)


def _experts(old: OldConfig, new: Pieces) -> None:
    """vLLM spreads experts over the tensor-parallel devices of all its data-parallel ranks, so many as that takes.
    Here a rank is one device."""
    key = "policy.generation.vllm_cfg.expert_parallel_size"
    ways, width = old.whole(key, 1), old.whole("policy.generation.vllm_cfg.tensor_parallel_size", 1, least=1)
    ranks, is_uneven = divmod(ways, width)
    is_divided = width * old.whole("policy.generation.vllm_cfg.pipeline_parallel_size", 1) > 1
    if ways > 1 and (is_uneven or (ranks > 1 and (is_divided or ways > old.whole("cluster.gpus_per_node", 1)))):
        new.miss(key, WIDE_EXPERTS)
        return
    if ranks > 1:
        new.put("generation.backend.data_parallel_size", ranks)
    if ways > 1 or old.get("policy.generation.vllm_cfg.enable_expert_parallel"):
        new.put("generation.backend.expert_parallel", True)


def _speculation(old: OldConfig, new: Pieces) -> None:
    """Tokens guessed by what stood before, by a smaller model, EAGLE's head or the policy's MTP layers."""
    path = "policy.generation.vllm_kwargs.speculative_config"
    method, count = old.get(f"{path}.method"), old.get(f"{path}.num_speculative_tokens")
    method = "mtp" if method in MTP_METHODS else method
    if method not in ("ngram", "draft_model", "eagle3", "mtp"):
        return
    new.put("generation.backend.speculative.method", method)
    new.put_given("generation.backend.speculative.num_speculative_tokens", count)
    if method == "mtp":
        return
    if method != "ngram":
        new.put_given("generation.backend.speculative.model", old.get(f"{path}.model"))
        return
    # vLLM takes either limit for both where only one is given, and 5 where none is.
    low, high = (old.get(f"{path}.prompt_lookup_{end}") for end in ("min", "max"))
    new.put("generation.backend.speculative.prompt_lookup_min", low or high or 5)
    new.put("generation.backend.speculative.prompt_lookup_max", high or low or 5)


def _place(old: OldConfig, new: Pieces) -> None:
    if old.get("policy.generation.colocated.enabled", True):
        new.put("cluster.colocated", True)
        return
    resources = "policy.generation.colocated.resources"
    per_node = old.whole(f"{resources}.gpus_per_node", old.whole("cluster.gpus_per_node", 1))
    nodes = old.whole(f"{resources}.num_nodes", 1)
    new.put("cluster.colocated", False)
    new.put("cluster.generation_workers", max(1, per_node * nodes // _devices(new)))


def _devices(new: Pieces) -> int:
    """That one engine spreads over."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    given = (new.values.get(f"generation.backend.{name}") for name in sizes)
    return prod(size if isinstance(size, int) and size > 0 else 1 for size in given)


def validation(old: OldConfig, new: Pieces) -> None:
    """When and how much is validated, and at which temperature."""
    if old.family == "eval":
        _evaluation(old, new)
        return
    period = old.own("val_period", {"dpo": 25, "rm": 16, "ppo": 20, "distillation": 20}.get(old.family, 10))
    new.put("validation.every", 0 if isinstance(period, int) and period < 0 else period)
    new.put("validation.at_start", old.own("val_at_start", old.family in ("sft", "dpo", "ppo")))
    new.put("validation.at_end", old.own("val_at_end", False))
    new.put_given("validation.max_samples", _validated_rows(old))
    if old.family not in SAMPLES:
        return
    # Until January 2026 validation sampled as training does; since then it has a temperature of its own.
    trained = old.get("policy.generation.temperature", 1.0)
    new.put("validation.temperature", old.get("policy.generation.val_temperature", trained))
    for name in ("top_p", "top_k"):
        given = old.get(f"policy.generation.val_{name}")
        is_same = given in (-1, old.get(f"policy.generation.{name}", 1.0 if name == "top_p" else None))
        new.put_given(f"validation.{name}", None if is_same else given)
    new.put("validation.num_generations", _responses_per_row(old))


def _evaluation(old: OldConfig, new: Pieces) -> None:
    """An evaluation is the validation of a run that is not trained: all rows of its dataset."""
    new.put("validation.max_samples", 10**9)
    new.put("validation.temperature", old.get("policy.generation.temperature", 0.0))
    for name, nothing in {"top_p": (1, 1.0), "top_k": (-1,)}.items():
        given = old.get(f"policy.generation.{name}")
        new.put_given(f"validation.{name}", None if given in nothing else given)
    new.put("validation.num_generations", _responses_per_row(old))


def _responses_per_row(old: OldConfig) -> Any:
    """A dataset that is repeated is several responses per row."""
    drawn = old.get("policy.generation.temperature", 1.0)
    if (drawn if old.family == "eval" else old.get("policy.generation.val_temperature", drawn)) == 0:
        return 1  # greedy responses to one prompt are all the same
    count = {"grpo": "val_num_generations_per_prompt", "eval": "num_tests_per_prompt"}.get(old.family, "")
    samples = old.own(count, 1)
    return samples * _repeats(old) if isinstance(samples, int) else samples


def _repeats(old: OldConfig) -> int:
    if old.is_flat and old.get("data.dataset_name") == "DeepScaler":
        return 16  # its validation set, AIME 2024, was repeated that often
    sets = old.get("data.validation")
    repeats = [item.get("repeat") for item in sets if isinstance(item, dict)] if isinstance(sets, list) else []
    times = repeats[0] if repeats and repeats.count(repeats[0]) == len(repeats) else old.get("data.validation.repeat")
    return times if isinstance(times, int) and not isinstance(times, bool) and times > 0 else 1


def _validated_rows(old: OldConfig) -> int | None:
    """Rows in whole batches: what does not fill one was left out."""
    if old.family in ("sft", "dpo", "rm"):
        batches = old.own("val_batches", -1 if old.family == "rm" else 8)
        size = old.own("val_global_batch_size", 8 if old.family == "dpo" else 32)
        is_limited = isinstance(batches, int) and isinstance(size, int) and batches > 0
        return batches * size if is_limited else 10**9
    default = 512 if old.family == "distillation" else 256
    rows, size = old.own("max_val_samples", default), old.own("val_batch_size", 64 if default == 512 else 256)
    if not isinstance(rows, int):
        return 10**9
    if isinstance(size, int) and 0 < size <= rows:
        rows = -(-rows // size) * size if old.family == "distillation" else rows // size * size
    return max(1, rows // _repeats(old))
