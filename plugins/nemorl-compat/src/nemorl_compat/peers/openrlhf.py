"""OpenRLHF's arguments whose translation takes more than a new name. Defaults are those of 2025-11."""

from __future__ import annotations

from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.peers import common
from nemorl_compat.peers.reading import Given

ESTIMATORS = {
    "group_norm": "grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "dr_grpo": "grpo",
}
"""``dr_grpo`` there is GRPO without the division by the spread; its average stays one over tokens."""
AVERAGES = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
COLUMNS = {
    "input_key": "prompt_column",
    "label_key": "answer_column",
    "output_key": "response_column",
    "chosen_key": "chosen_column",
    "rejected_key": "rejected_column",
    "prompt_key": "prompt_column",
}


def family(given: Given) -> str | None:
    """Which command the arguments are of."""
    if "rollout_batch_size" in given.values or "n_samples_per_prompt" in given.values:
        return "grpo"
    return "dpo" if "chosen_key" in given.values or "rejected_key" in given.values else None


def precision(given: Given, new: Pieces) -> None:
    kept = given.get("ds.param_dtype", "bf16" if given.get("bf16", False) else "fp32")
    if kept == "fp16":
        new.miss("ds.param_dtype", "float16")
    new.put("policy.precision", "bfloat16" if kept == "bf16" else "float32")
    if kept == "bf16":
        new.differ(
            "ds.param_dtype" if given.has("ds.param_dtype") else "bf16",
            "weights are kept in bfloat16 without a copy in float32",
        )
    common.attention(given, new)


def adapters(given: Given, new: Pieces) -> None:
    if given.number("lora_rank", 0) > 0:
        common.lora(given, new, rank="lora_rank", modules="target_modules", prefix="", alpha=16, dropout=0.0)


def data(given: Given, new: Pieces) -> None:
    key = "prompt_data" if given.has("prompt_data") else "dataset"
    if not given.has(key):
        return
    probs = "prompt_data_probs" if given.has("prompt_data_probs") else "dataset_probs"
    weights = given.get(probs)
    if weights is not None and len(common.listed(weights)) != len(common.listed(given.get(key))):
        new.miss(probs, "as many weights as datasets")
        weights = None
    elif weights is not None:
        new.differ(probs, "rows come in these proportions exactly, where OpenRLHF draws them")
    options = {ours: given.get(theirs) for theirs, ours in COLUMNS.items() if given.has(theirs)}
    split = given.get("prompt_split", given.get("dataset_split"))
    if split is not None:
        options["train_split"] = split
    if given.has("input_template"):
        column = options.get("prompt_column", "input")
        options["prompt_template"] = str(given.get("input_template")).replace("{}", "{" + column + "}")
    if given.get("apply_chat_template", False) and given.family == "grpo":
        options["chat"] = True
    if given.number("max_samples", 1e8) < 1e8:
        options["max_rows"] = given.whole("max_samples", 1e8)
    new.put("data", common.dataset(given.get(key), weights=weights, **_fitting(given.get(key), options)))
    if given.has("eval_dataset"):
        held_out = given.get("eval_dataset")
        split = {"train_split": given.get("eval_split")} if given.has("eval_split") else {}
        new.put("validation.data", common.dataset(held_out, **_fitting(held_out, {**options, **split})))
    if given.family == "sft":
        new.put("only_last_turn", not given.get("multiturn", False))


def _fitting(path: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a file has too, where it is one: no splits."""
    is_file = common.dataset(path)["name"] == "file"
    return {key: value for key, value in options.items() if key != "train_split" or not is_file}


def lengths(given: Given, new: Pieces) -> None:
    tokens = "train_max_tokens_per_gpu" if given.get("use_dynamic_batch", False) else None
    rows = "micro_train_batch_size"
    if given.family != "grpo":
        limit = given.whole("max_len", 2048 if given.family == "sft" else 512)
        new.put("policy.max_sequence_tokens", limit)
        common.microbatches(given, new, rows, limit * (1 if given.family == "sft" else 2), tokens=tokens)
        return
    # Since 2026 max_len bounds prompt and response together, and a response takes what the prompt leaves.
    free = given.number("max_len", 0) - 1 if given.has("max_len") else 1024
    longest = given.number("generate_max_len", given.number("max_new_tokens", free))
    new.put("generation.max_new_tokens", int(longest))
    whole = given.number("max_len", given.number("prompt_max_len", 1024) + longest)
    new.put("policy.max_sequence_tokens", int(whole))
    common.microbatches(given, new, rows, whole, tokens=tokens)


def batches(given: Given, new: Pieces) -> None:
    if given.family != "grpo":
        return
    responses = given.number("rollout_batch_size", 1024) * given.number("n_samples_per_prompt", 1)
    size = given.number("train_batch_size", 128)
    new.put("num_minibatches", common.divided(new, "train_batch_size", responses, size, "minibatches"))


def cluster(given: Given, new: Pieces) -> None:
    if given.family == "grpo":
        nodes = given.whole("actor_num_nodes", 1)
        new.put("cluster.gpus_per_node", given.whole("actor_num_gpus_per_node", 8))
        new.put("cluster.num_nodes", nodes)
        new.put("cluster.address", "auto" if nodes > 1 else None)


def rollout(given: Given, new: Pieces) -> None:
    if given.family != "grpo":
        return
    new.put("generation.backend", "vllm")
    width = given.whole("vllm_tensor_parallel_size", 1, least=1)
    new.put("generation.backend.gpu_memory_utilization", given.number("vllm_gpu_memory_utilization", 0.95))
    new.put("generation.backend.enforce_eager", bool(given.get("enforce_eager", False)))
    if given.get("colocate_all_models", False):
        common.shared_engine(new, "vllm_tensor_parallel_size", width)
    else:
        new.put("generation.backend.tensor_parallel_size", int(width))
        new.put("cluster.colocated", False)
        engines = given.number("vllm_num_engines", 0) * width
        if engines:
            total = new.values["cluster.num_nodes"] * new.values["cluster.gpus_per_node"] + int(engines)
            nodes = new.values["cluster.num_nodes"]
            new.put("cluster.gpus_per_node", common.divided(new, "vllm_num_engines", total, nodes, "GPUs per node"))
            new.put("cluster.generation_workers", given.whole("vllm_num_engines", 1))
    if given.get("async_train", False):
        new.put("rollouts.mode", "async")
        new.put("rollouts.max_staleness", given.whole("async_queue_size", 1))
        new.differ("async_queue_size", "it bounds how many updates old a response may be, not a queue")


def validation(given: Given, new: Pieces) -> None:
    every = max(0, given.whole("eval_steps", -1))
    new.put("validation.every", every if given.has("eval_dataset") else 0)
    new.put("validation.at_end", bool(every))
    new.put("validation.max_samples", common.ALL_ROWS)
    if given.family == "grpo" and every:
        new.put("validation.temperature", given.number("eval_temperature", 0.6))
        new.put("validation.num_generations", given.whole("eval_n_samples_per_prompt", 4))


def correction(given: Given, new: Pieces) -> None:
    level = "algo.advantage.is_correction_level"
    if given.get(level, "off") != "off":
        kind, key = _scheme(given), level
    elif given.get("enable_vllm_is_correction", False):
        kind, key = str(given.get("vllm_is_correction_type", "tis")), "vllm_is_correction_type"
    else:
        return
    low, high = common.pair(given, "vllm_is_truncated_threshold", (0.5, 5.0), low=0.0)
    if key != level and not given.has("vllm_is_truncated_threshold"):
        new.differ("vllm_is_truncated_threshold", "the bounds are OpenRLHF's of 2026-08, 0.5 and 5; older ones had 2")
    if kind == "tis":
        new.put("importance_correction", {"kind": "truncated", "cap": high, "low": low})
    elif kind in ("icepop", "seq-mask-tis"):
        name = "icepop" if kind == "icepop" else "sequence_mask"
        new.put("importance_correction", {"kind": name, "low": low, "high": high})
    else:
        new.miss(key, f"the importance correction {kind}")


def _scheme(given: Given) -> str:
    """The name before 0.11 of what is now said by three options."""
    defaults = {"level": "off", "mode": "mask", "gating": "ratio"}
    level, mode, gating = (given.word(f"algo.advantage.is_correction_{part}", word) for part, word in defaults.items())
    names = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}
    known = names.get((level, mode)) if gating == "ratio" else None
    return known or f"{level} {mode} {gating}"


def algorithm(given: Given, new: Pieces) -> None:
    if given.family != "grpo":
        return
    estimator = given.word("advantage_estimator", "gae")
    if estimator not in ESTIMATORS:
        new.miss("advantage_estimator", "PPO with a critic (not translated)")
        return
    new.put("algorithm", ESTIMATORS[estimator])
    if given.get("policy_loss_type", "ppo") == "gspo":
        if ESTIMATORS[estimator] == "grpo":
            new.put("algorithm", "gspo")
        else:
            new.miss("policy_loss_type", f"gspo with {estimator}")
    if ESTIMATORS[estimator] == "grpo":
        common.advantage(new, "openrlhf", divides=estimator == "group_norm")


def loss(given: Given, new: Pieces) -> None:
    if given.family == "dpo":
        new.put("loss", "ipo" if given.get("ipo", False) else "sigmoid")
    if given.family != "grpo" or "algorithm" not in new.values:
        return
    clip = given.number("eps_clip", 0.2)
    low, high = common.pair(given, "eps_clip_low_high", (clip, clip))
    values: dict[str, Any] = {"clip_low": low, "clip_high": high}
    if new.values["algorithm"] != "gspo":
        mode = given.word("actor.loss_agg_mode", "token-mean")
        values |= {"dual_clip": given.get("dual_clip"), "loss_aggregation": AVERAGES.get(mode, "token")}
        if mode not in AVERAGES:
            new.miss("actor.loss_agg_mode", f"the average {mode}")
    weight = given.number("init_kl_coef", 0.01)
    if new.values["algorithm"] == "reinforce_plus_plus" and not given.get("use_kl_loss", False):
        for knob, value in {**values, "kl_penalty": weight}.items():
            new.put(knob, value)
        return
    kind = "k3" if given.get("use_kl_estimator_k3", False) else given.get("kl_estimator", "k1")
    if weight and not given.get("use_kl_loss", False):
        new.miss("init_kl_coef", "a KL that is charged token by token in the reward (use_kl_loss has it in the loss)")
    elif weight and kind == "k1":
        new.miss("kl_estimator", "k1 in the loss by its derivative, which is zero on average (k2 has the gradient)")
    values |= {"kl_in": "loss", "kl_type": kind if weight and kind != "k1" else "k3", "kl_gradient": "estimator"}
    values |= {"kl_importance_weights": False, "kl_input_clamp": 40.0, "kl_output_clamp": 10.0}
    common.loss(new, "openrlhf", values, weight)


def rewards(given: Given, new: Pieces) -> None:
    if given.family != "grpo":
        return
    if given.has("reward_pretrain") and not given.has("remote_rm_url"):
        new.put("environment", {"name": "reward_model", "model": given.get("reward_pretrain")})
    if given.has("remote_rm_url"):
        new.miss("remote_rm_url", f"a reward by path or address ({given.get('remote_rm_url')}: register it)")
    low, high = common.pair(given, "reward_clip_range", (-10.0, 10.0))
    if given.has("reward_clip_range"):
        new.put("reward_scaling", {"source_min": low, "source_max": high, "target_min": low, "target_max": high})
    elif given.has("reward_pretrain"):
        new.put("reward_scaling", {"source_min": -10.0, "source_max": 10.0, "target_min": -10.0, "target_max": 10.0})
    if given.has("overlong_buffer_len"):
        new.put(
            "overlong_penalty",
            {
                "max_response_tokens": new.values["generation.max_new_tokens"],
                "buffer_tokens": given.whole("overlong_buffer_len", 1),
                "penalty": given.number("overlong_penalty_factor", 1.0),
            },
        )


def schedule(given: Given, new: Pieces) -> None:
    key = "actor_learning_rate" if given.family == "grpo" else "learning_rate"
    new.put("policy.optimizer.lr", given.number(key, {"grpo": 1e-6, "sft": 5e-6}.get(str(given.family), 1e-5)))
    common.schedule(
        new,
        "lr_scheduler",
        given.word("lr_scheduler", "cosine_with_min_lr"),
        warmup=given.number("lr_warmup_ratio", 0.03),
        floor=given.number("min_lr_ratio", 0.1),
    )


def checkpoints(given: Given, new: Pieces) -> None:
    every = max(0, given.whole("save_steps", -1))
    new.put("checkpoint.every", every)
    new.put("checkpoint.keep_last", given.whole("max_ckpt_num", 3))


def loggers(given: Given, new: Pieces) -> None:
    made: list[dict[str, Any]] = []
    if given.get("use_wandb"):
        options = {"project": "wandb_project", "entity": "wandb_org", "run_name": "wandb_run_name"}
        made.append({"name": "wandb", **{ours: given.get(key) for ours, key in options.items() if given.has(key)}})
    if given.get("use_tensorboard"):
        made.append({"name": "tensorboard"})
    new.put("loggers", made)


PARTS = (
    precision,
    adapters,
    data,
    lengths,
    batches,
    cluster,
    rollout,
    validation,
    correction,
    algorithm,
    loss,
    rewards,
    schedule,
    checkpoints,
    loggers,
)
