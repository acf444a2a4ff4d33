"""Settings of old configs whose translation takes more than a new name: one function per subject.

Each takes what it understands from the old config and returns pieces of the new one, by dotted path. What it does not
understand it leaves, to be reported as unmapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemorl_compat.legacy_keys import Keys

Pieces = dict[str, Any]

HUB: Mapping[str, Mapping[str, Any]] = {
    "openmathinstruct2": {
        "path": "nvidia/OpenMathInstruct-2",
        "train_split": "train_1M",
        "prompt_column": "problem",
        "answer_column": "expected_answer",
        "response_column": "generated_solution",
        "validation_fraction": 0.05,
    },
    "deepscaler": {
        "path": "agentica-org/DeepScaleR-Preview-Dataset",
        "prompt_column": "problem",
        "answer_column": "answer",
    },
    "tulu3sftmixture": {"path": "allenai/tulu-3-sft-mixture", "messages_column": "messages"},
}
"""Datasets by their old names, in small letters and digits only (they are written in several ways)."""

FILE_KINDS = ("ResponseDataset", "openai_format", "BinaryPreferenceDataset", "PreferenceDataset")
"""Names that stand for "the file given by a path"."""

COLUMNS = {
    "input_key": "prompt_column",
    "prompt_key": "prompt_column",
    "output_key": "response_column",
    "chat_key": "messages_column",
    "chosen_key": "chosen_column",
    "rejected_key": "rejected_column",
}
TABLES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")


def algorithm(keys: Keys, section: str) -> str:
    """GRPO's variants were switches; here they are algorithms."""
    if section != "grpo":
        return section
    if keys.take("loss_fn.use_cispo", False):
        return "cispo"
    if keys.take("loss_fn.sequence_level_importance_ratios", False):
        keys.skip("loss_fn.token_level_loss")
        return "gspo"
    estimator = keys.take("grpo.adv_estimator.name", "grpo")
    baseline = keys.take("grpo.adv_estimator.minus_baseline", True)
    if estimator == "reinforce_plus_plus" and baseline:
        return "reinforce_plus_plus_baseline"
    return str(estimator)


def backend(keys: Keys, section: str) -> Pieces:
    """One name instead of a switch per backend; the settings of the one that is off mean nothing."""
    is_megatron = bool(keys.take("policy.megatron_cfg.enabled", False))
    is_both = is_megatron and bool(keys.take("policy.dtensor_cfg.enabled", False))
    name = "megatron" if is_megatron else "dtensor"
    keys.skip("policy.dtensor_cfg" if is_megatron else "policy.megatron_cfg")
    settings = f"policy.{name}_cfg"
    width = keys.take(
        f"{settings}.tensor_model_parallel_size" if is_megatron else f"{settings}.tensor_parallel_size", 1
    )
    found: Pieces = {
        "policy.backend": name,
        "policy.tensor_parallel_size": width,
        "policy.activation_checkpointing": bool(keys.take(f"{settings}.activation_checkpointing", False)),
        "policy.precision": keys.take("policy.precision"),
    }
    sequence_parallel = keys.take(f"{settings}.sequence_parallel")
    if not is_megatron and width > 1 and sequence_parallel is not None:
        found["policy.backend"] = {"name": name, "sequence_parallel": sequence_parallel}
    replicas = keys.take(f"{settings}.dp_replicate_size")
    if not is_megatron and replicas:
        found["policy.backend.data_parallel_replicas"] = replicas
    if is_both:
        found["?policy.dtensor_cfg.enabled"] = "both backends are on; this is megatron's config"
    if keys.take("policy.tokenizer.name") not in (None, keys.take("policy.model_name")):
        found["?policy.tokenizer.name"] = "the tokenizer is the model's own"
    return found | _lora(keys, settings) | (_megatron_optimizer(keys) if is_megatron else _torch_optimizer(keys))


def _lora(keys: Keys, settings: str) -> Pieces:
    path = f"{settings}.lora_cfg"
    if not keys.take(f"{path}.enabled", False):
        keys.skip(path)
        return {}
    found = {
        "policy.lora.rank": keys.take(f"{path}.dim"),
        "policy.lora.alpha": keys.take(f"{path}.alpha"),
        "policy.lora.dropout": keys.take(f"{path}.dropout"),
    }
    everywhere, modules = keys.take(f"{path}.match_all_linear", False), keys.take(f"{path}.target_modules")
    return found | {"policy.lora.target_modules": "all-linear" if everywhere or not modules else modules}


def _torch_optimizer(keys: Keys) -> Pieces:
    keys.skip("policy.optimizer.kwargs.foreach", "policy.optimizer.kwargs.fused")
    name = keys.take("policy.optimizer.name", "torch.optim.AdamW")
    found = {
        f"policy.optimizer.{option}": keys.take(f"policy.optimizer.kwargs.{option}")
        for option in ("lr", "weight_decay", "betas", "eps")
    }
    if not str(name).endswith("AdamW"):
        found["?policy.optimizer.name"] = f"the optimizer is AdamW, not {name}"
    given = keys.take("policy.scheduler")
    return found | (_torch_schedule(given, found["policy.optimizer.lr"]) if given else {})


def _torch_schedule(given: Any, lr: float | None) -> Pieces:
    """A warm-up and a decay out of torch's list of schedulers."""
    parts = [part for part in (given if isinstance(given, list) else [given]) if isinstance(part, Mapping)]
    found: Pieces = {}
    decays = 0
    for part in parts:
        kind, options = str(part.get("name", "")).rpartition(".")[2], part.get("kwargs") or {}
        rises = options.get("start_factor", 1.0) < options.get("end_factor", 1.0)
        if kind == "LinearLR" and rises and not decays:
            found["policy.schedule.warmup_steps"] = options.get("total_iters")
        elif kind == "LinearLR":
            decays = options.get("total_iters", 0)
            found["policy.schedule.kind"] = "linear"
            found["policy.schedule.min_lr_frac"] = options.get("end_factor", 1.0)
        elif kind == "CosineAnnealingLR":
            decays = options.get("T_max", 0)
            found["policy.schedule.kind"] = "cosine"
            found["policy.schedule.min_lr_frac"] = options.get("eta_min", 0.0) / (lr or 1.0)
        elif kind not in ("ConstantLR", "") or (kind == "ConstantLR" and options.get("factor", 1.0) != 1.0):
            found["?policy.scheduler"] = f"no schedule is like {kind}"
    if decays:
        found["policy.schedule.decay_steps"] = decays + (found.get("policy.schedule.warmup_steps") or 0)
    return found


def _megatron_optimizer(keys: Keys) -> Pieces:
    settings, schedule = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    keys.skip("policy.optimizer", "policy.scheduler")
    lr, floor = keys.take(f"{settings}.lr"), keys.take(f"{settings}.min_lr")
    found: Pieces = {
        "policy.optimizer.lr": lr,
        "policy.optimizer.weight_decay": keys.take(f"{settings}.weight_decay"),
        "policy.optimizer.eps": keys.take(f"{settings}.adam_eps"),
        "policy.schedule.kind": keys.take(f"{schedule}.lr_decay_style", "constant"),
        "policy.schedule.warmup_steps": keys.take(f"{schedule}.lr_warmup_iters"),
    }
    betas = keys.take(f"{settings}.adam_beta1"), keys.take(f"{settings}.adam_beta2")
    if None not in betas:
        found["policy.optimizer.betas"] = list(betas)
    if found["policy.schedule.kind"] != "constant":
        found["policy.schedule.decay_steps"] = keys.take(f"{schedule}.lr_decay_iters")
        found["policy.schedule.min_lr_frac"] = floor / lr if floor is not None and lr else None
    return found


def generation(keys: Keys, section: str) -> Pieces:
    """The engine, and whether it shares devices with training."""
    if section != "grpo":
        keys.skip("policy.generation")
        return {}
    name = keys.take("policy.generation.backend", "vllm")
    engines = ("vllm_cfg", "vllm_kwargs", "mcore_generation_config", "sglang_cfg", "trtllm_cfg", "dynamo_cfg")
    keys.skip(*(f"policy.generation.{part}" for part in engines if not part.startswith(f"{name}_")))
    found: Pieces = {"generation.backend.name": name}
    if name == "vllm":
        for option in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager"):
            found[f"generation.backend.{option}"] = keys.take(f"policy.generation.vllm_cfg.{option}")
    length = keys.take("policy.max_total_sequence_length")
    longest = keys.take("policy.generation.max_new_tokens")
    if length is not None and longest is not None and longest >= length:
        # The room that a prompt leaves is the limit, there and here; here the setting must leave some.
        found["generation.max_new_tokens"] = length - 1
    if keys.take("policy.generation.colocated.enabled", True):
        keys.skip("policy.generation.colocated")
        return found
    devices = keys.take("policy.generation.colocated.resources.gpus_per_node") or 1
    nodes = keys.take("policy.generation.colocated.resources.num_nodes") or 1
    width = found.get("generation.backend.tensor_parallel_size") or 1
    return found | {"cluster.colocated": False, "cluster.generation_workers": max(1, devices * nodes // width)}


def rewards(keys: Keys, section: str) -> Pieces:
    """Shaping and scaling of rewards, corrections, asynchrony: what GRPO configs turn on by ``enabled``."""
    if section != "grpo":
        return {}
    found: Pieces = {"loss_aggregation": "token" if keys.take("loss_fn.token_level_loss", True) else "sequence"}
    shaping, scaling, late = "grpo.reward_shaping", "grpo.reward_scaling", "grpo.async_grpo"
    if keys.take(f"{shaping}.enabled", False):
        factor = keys.take(f"{shaping}.stop_properly_penalty_coef")
        longest = keys.take(f"{shaping}.max_response_length", keys.take("policy.max_total_sequence_length"))
        penalty = {
            "max_response_tokens": longest,
            "buffer_tokens": keys.take(f"{shaping}.overlong_buffer_length", 128),
            "penalty": keys.take(f"{shaping}.overlong_buffer_penalty", 1.0),
        }
        found |= {"truncation_reward_factor": factor} if factor is not None else {"overlong_penalty": penalty}
    else:
        keys.skip(shaping)
    if keys.take(f"{scaling}.enabled", False):
        names = ("source_min", "source_max", "target_min", "target_max")
        found |= {f"reward_scaling.{name}": keys.take(f"{scaling}.{name}") for name in names}
    else:
        keys.skip(scaling)
    if keys.take(f"{late}.enabled", False):
        found |= {
            "rollouts.mode": "async",
            "rollouts.max_staleness": keys.take(f"{late}.max_trajectory_age_steps", 1),
        }
    else:
        keys.skip(late)
    if not keys.take("grpo.use_dynamic_sampling", False):
        keys.skip("grpo.dynamic_sampling_max_gen_batches", "grpo.batch_multiplier")
    if keys.take("loss_fn.use_cispo", False):
        # One bound on the weight of a token, where GRPO clips a ratio on both sides.
        cap = 1 + keys.take("loss_fn.ratio_clip_max", 0.2)
        found |= {"ratio_cap": cap, "clip_low": None, "clip_high": None}
    return found | _kl(keys) | _correction(keys) | _minibatches(keys)


def _kl(keys: Keys) -> Pieces:
    default = "k2" if algorithm(keys, "grpo") == "reinforce_plus_plus_baseline" else "k3"
    kind = keys.take("loss_fn.reference_policy_kl_type", default)
    bound = keys.take("loss_fn.kl_output_clamp_value", 10)
    return {
        "kl_type": None if kind == default else kind,
        "kl_input_clamp": keys.take("loss_fn.kl_input_clamp_value", 20) or 40,  # none is further than there is here
        "kl_output_clamp": bound,
        "kl_importance_weights": keys.take("loss_fn.use_on_policy_kl_approximation", False),
        **({} if bound else {"?loss_fn.kl_output_clamp_value": "add kl_output_clamp: null for no bound"}),
    }


def _correction(keys: Keys) -> Pieces:
    cap = keys.take("loss_fn.truncated_importance_sampling_ratio")
    floor = keys.take("loss_fn.truncated_importance_sampling_ratio_min")
    kind = keys.take("loss_fn.truncated_importance_sampling_type") or "tis"
    if not keys.take("loss_fn.use_importance_sampling_correction", False):
        return {}
    if cap is None:
        return {"importance_correction": {"kind": "plain"}}
    if kind == "tis":
        return {"importance_correction": {"kind": "truncated", "cap": cap}}
    names = {"icepop": "icepop", "seq-mask-tis": "sequence_mask"}
    return {"importance_correction": {"kind": names.get(kind, kind), "low": floor, "high": cap}}


def _minibatches(keys: Keys) -> Pieces:
    """Optimizer steps of a batch: its responses over those of one step."""
    size = keys.take("policy.train_global_batch_size")
    responses = keys.take("grpo.num_prompts_per_step", 32) * keys.take("grpo.num_generations_per_prompt", 16)
    if size is None or size >= responses:
        return {}
    if responses % size:
        return {"?policy.train_global_batch_size": f"{size} does not divide a batch of {responses} responses"}
    return {"num_minibatches": responses // size}


def checkpoints(keys: Keys, section: str) -> Pieces:
    """Which metric ranks checkpoints, under the name it is logged by."""
    is_on = keys.take("checkpointing.enabled", True)
    period = keys.take("checkpointing.save_period")
    found: Pieces = {"checkpoint.every": period if is_on else 0}
    metric, is_higher = keys.take("checkpointing.metric_name"), keys.take("checkpointing.higher_is_better")
    source, _, name = str(metric or "").rpartition(":")
    own = {"sft": "val_loss", "dpo": "validation-default_loss"}.get(section, "accuracy")
    if metric and source != "train" and name in (own, "val_reward"):
        return found
    if metric:
        found["checkpoint.metric"] = f"{'train' if source == 'train' else 'validation'}/{name}"
        found["checkpoint.higher_is_better"] = is_higher
    return found


def cluster(keys: Keys, section: str) -> Pieces:
    """One GPU is what a run takes anyway; several nodes need a Ray cluster that spans them."""
    devices, nodes = keys.take("cluster.gpus_per_node", 1), keys.take("cluster.num_nodes", 1)
    found: Pieces = {} if devices == 1 and nodes == 1 else {"cluster.gpus_per_node": devices}
    return found | ({"cluster.address": "auto"} if nodes > 1 else {})


def loggers(keys: Keys, section: str) -> Pieces:
    """The loggers that are on, with their options."""
    options = {
        "wandb": {"project": "project", "name": "run_name", "entity": "entity"},
        "mlflow": {"experiment_name": "experiment", "run_name": "run_name", "tracking_uri": "tracking_uri"},
        "tensorboard": {},
    }
    made = []
    for name, names in options.items():
        if keys.take(f"logger.{name}_enabled", False):
            given = {new: keys.take(f"logger.{name}.{old}") for old, new in names.items()}
            made.append({"name": name, **{key: value for key, value in given.items() if value is not None}})
            keys.skip(f"logger.{name}.log_dir")
        else:
            keys.skip(f"logger.{name}")
    if keys.take("logger.swanlab_enabled", False):
        return {"loggers": made, "?logger.swanlab": "there is no logger for SwanLab"}
    keys.skip("logger.swanlab")
    return {"loggers": made}


def validation(keys: Keys, section: str) -> Pieces:
    """How much is validated, where that was said in batches."""
    batches, size = keys.take(f"{section}.val_batches"), keys.take(f"{section}.val_global_batch_size")
    if section == "grpo" or not batches or batches < 0 or not size:
        return {}
    return {"validation.max_samples": batches * size}


def environment(keys: Keys, section: str) -> Pieces:
    """The one environment that the data names, or the only one there is."""
    if section != "grpo":
        keys.skip("env")
        return {}
    asked = [
        keys.take(f"data.{place}env_name") for place in ("", "train.", "default.") if keys.has(f"data.{place}env_name")
    ]
    name = str(asked[0]) if asked and asked[0] else "math"
    if not keys.has(f"env.{name}") and not name.startswith("math"):
        return {f"?env.{name}": "set `environment:` to what scores the responses"}
    if name not in ("math", "math_default"):
        return {f"?env.{name}": "no environment of this kind: set `environment:`, or pass a reward function"}
    return {"environment.name": "math", "environment.workers": keys.take(f"env.{name}.num_workers")}


def data(keys: Keys, section: str, folders: tuple[Path, ...]) -> Pieces:
    """The dataset: flat keys under ``data``, or ``train``, ``validation`` and ``default`` sections."""
    sections = keys.has("data.train")
    train = _dataset(keys, ("data.train.", "data.default.") if sections else ("data.",), section, folders)
    if train is None:
        return {"?data": "set `data:` to a dataset, a file or rows"}
    if sections and keys.has("data.validation"):
        held_out = _dataset(keys, ("data.validation.", "data.default."), section, folders)
        if held_out is not None and held_out != train:
            return {"data": train, "validation.data": held_out}
    return {"data": train}


def _dataset(keys: Keys, places: tuple[str, ...], section: str, folders: tuple[Path, ...]) -> dict[str, Any] | None:
    def take(name: str) -> Any:
        found = [keys.take(f"{place}{name}") for place in places]
        return next((value for value in found if value is not None), None)

    name, path = take("dataset_name"), take("data_path") or take("train_data_path")
    known = HUB.get("".join(letter for letter in str(name or "").lower() if letter.isalnum()))
    made: dict[str, Any]
    if known is not None:
        made = {"name": "huggingface", **known}
        unused = "response_column" if section == "grpo" else "answer_column"
        made.pop(unused, None)
    elif path is not None:
        is_file = str(path).endswith(TABLES)
        made = {"name": "file" if is_file else "huggingface", "path": path}
        held_out = take("val_data_path")
        if is_file and held_out is not None:
            made["validation_path"] = held_out
    elif name is not None and name not in FILE_KINDS and "/" in str(name):
        made = {"name": "huggingface", "path": name}
    else:
        return None
    split, fraction, seed = take("split") or take("train_split"), take("split_validation_size"), take("seed")
    if made["name"] == "huggingface":
        given = {"train_split": split, "validation_split": take("val_split"), "config_name": take("subset")}
        made |= {key: value for key, value in given.items() if value is not None}
    if fraction is not None:
        made |= {"validation_fraction": fraction, **({"seed": seed} if seed is not None else {})}
    for old, new in COLUMNS.items():
        value = take(old)
        if value is not None:
            # GRPO's second column is the answer that is graded, not a response to imitate.
            made["answer_column" if old == "output_key" and section == "grpo" else new] = value
    return made | _prompt(take, made, section, folders)


def _prompt(take: Callable[[str], Any], made: Mapping[str, Any], section: str, folders: tuple[Path, ...]) -> Pieces:
    """Templates out of their files; conversations through the chat template, as they were."""
    found: Pieces = {"chat": True} if section == "grpo" else {}
    template, system = take("prompt_file"), take("system_prompt_file")
    for file, key in ((template, "prompt_template"), (system, "system_prompt")):
        if file is None:
            continue
        path = next((folder / file for folder in folders if (folder / file).is_file()), None)
        if path is None:
            found[f"?{key}"] = f"no file {file!r} to read it from"
            continue
        column = made.get("prompt_column", "prompt")
        text = path.read_text().strip()
        found[key] = text.replace("{}", f"{{{column}}}") if key == "prompt_template" else text
    return found
