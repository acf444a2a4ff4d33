"""TRL's arguments whose translation takes more than a new name. Defaults are those of TRL 1.16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.peers import common
from nemorl_compat.peers.reading import Given

REWARDS = {"accuracy_reward": "math", "trl.rewards.accuracy_reward": "math"}
"""TRL's own reward functions that have an environment here."""
SIGNS = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "epsilon", "num_iterations"),
    "sft": ("packing", "dataset_text_field", "completion_only_loss", "assistant_only_loss", "neftune_noise_alpha"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "dpo": ("precompute_ref_log_probs", "f_divergence_type", "rpo_alpha", "ld_alpha"),
}
"""Arguments that one kind of run has alone, but for those of DPO, which KTO has too."""
PAIRED = ("dpo", "orpo", "cpo")
"""Kinds of runs whose rows are two sequences."""


def family(given: Given) -> str | None:
    """Which trainer the arguments are of."""
    found = next((name for name, keys in SIGNS.items() if any(key in given.values for key in keys)), None)
    return "dpo" if found is None and "beta" in given.values else found


def _updates(given: Given, new: Pieces) -> int:
    """Optimizer steps of a step."""
    return int(new.values.get("num_minibatches", 1)) * max(1, given.whole("num_iterations", 1))


def _period(given: Given, new: Pieces, key: str, default: float) -> int:
    """So many of TRL's steps, which are optimizer steps, as steps; rounded where an update in between is meant."""
    value, updates = given.number(key, default), _updates(given, new)
    if 0 < value < 1:
        new.miss(key, "a share of the run as a number of steps")
        return 1
    if value % updates:
        new.differ(key, f"a step has {updates} updates, so it is done every {-(-value // updates):g} steps")
    return max(1, int(-(-value // updates)))


def precision(given: Given, new: Pieces) -> None:
    if given.get("fp16"):
        new.miss("fp16", "float16")
        return
    key = "dtype" if given.has("dtype") else "torch_dtype"
    kept = given.get(key, "float32")
    if kept not in ("float32", "bfloat16", "auto"):
        new.miss(key, f"the precision {kept}")
    computes = given.get("bf16", True)
    new.put("policy.precision", "bfloat16" if computes or kept == "bfloat16" else "float32")
    if computes and kept in ("float32", "auto"):
        new.differ("bf16", "weights are kept in bfloat16 too; TRL keeps them in float32 and computes in bfloat16")


def adapters(given: Given, new: Pieces) -> None:
    if given.get("use_peft", False):
        modules = "lora_target_modules"
        common.lora(given, new, rank="lora_r", modules=modules, prefix="", alpha=32, dropout=0.05)
        if given.family == "grpo" and given.number("beta", 0.0):
            new.differ("use_peft", "the reference is the base model, as in TRL")
    for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
        if given.has(key) and not given.get("use_peft", False):
            new.differ(key, "without use_peft there are no adapters")


def data(given: Given, new: Pieces) -> None:
    if not given.has("dataset_name"):
        return
    found = common.dataset(given.get("dataset_name"))
    splits = {"config_name": "dataset_config", "train_split": "dataset_train_split"}
    if given.get("eval_strategy", "no") != "no":
        splits["validation_split"] = "dataset_test_split"
    if found["name"] == "huggingface":
        found |= {ours: given.get(key) for ours, key in splits.items() if given.has(key)}
    new.put("data", found)


def lengths(given: Given, new: Pieces) -> None:
    rows = "per_device_train_batch_size"
    if given.family != "grpo":
        limit = given.whole("max_length", given.number("max_seq_length", 1024))
        new.put("policy.max_sequence_tokens", limit)
        common.microbatches(given, new, rows, limit * (2 if given.family in PAIRED else 1))
        if given.family in PAIRED and given.has("max_completion_length"):
            new.differ("max_completion_length", "responses are not cut: policy.max_sequence_tokens bounds the whole")
        return
    longest = given.whole("max_completion_length", 512)
    new.put("generation.max_new_tokens", longest)
    longest_row = max(4096, longest + given.whole("max_prompt_length", 1024))
    limit = given.whole("vllm_max_model_length", 0) or longest_row
    new.put("policy.max_sequence_tokens", limit)
    common.microbatches(given, new, rows, limit)


def batches(given: Given, new: Pieces) -> None:
    processes = given.whole("num_processes", given.number("nproc_per_node", 1))
    machines = given.whole("num_machines", 1)
    size_key = "per_device_train_batch_size"
    if not (given.has("num_processes") or given.has("nproc_per_node")):
        new.differ(size_key, "taken for one process: give the script with `accelerate launch --num_processes N`")
    elif processes > 1:
        new.put("cluster.gpus_per_node", common.divided(new, "num_processes", processes, machines, "GPUs per node"))
        new.put("cluster.num_nodes", machines)
        if machines > 1:
            new.put("cluster.address", "auto")
    accumulated = given.number("gradient_accumulation_steps", 1)
    size = given.number(size_key, 8) * processes
    if given.family != "grpo":
        rows = size * accumulated
        if rows != int(rows):
            new.miss("per_device_train_batch_size", f"a batch of {rows:g} rows")
        new.put("batch_size", int(rows))
        return
    rollouts = given.number("steps_per_generation", accumulated)
    together = given.number("generation_batch_size", size * rollouts)
    group = given.number("num_generations", 8)
    prompts = common.divided(new, size_key, together, group, "prompts per step")
    new.put("num_prompts_per_step", prompts)
    key = "generation_batch_size" if given.has("generation_batch_size") else "steps_per_generation"
    new.put("num_minibatches", common.divided(new, key, together, size * accumulated, "minibatches"))


def sampling(given: Given, new: Pieces) -> None:
    if given.family == "grpo":
        top_k = given.whole("top_k", 0)
        new.put("generation.top_k", top_k if top_k > 0 else None)
        new.put("generation.min_p", given.number("min_p", 0.0))


def vllm(given: Given, new: Pieces) -> None:
    if given.family != "grpo" or not given.get("use_vllm", False):
        return
    new.put("generation.backend", "vllm")
    new.put("generation.backend.gpu_memory_utilization", given.number("vllm_gpu_memory_utilization", 0.3))
    width = given.whole("vllm_tensor_parallel_size", 1, least=1)
    if given.get("vllm_mode", "colocate") == "colocate":
        common.shared_engine(new, "vllm_tensor_parallel_size", width)
    else:
        new.put("generation.backend.tensor_parallel_size", int(width))
        new.put("cluster.colocated", False)
        new.differ("vllm_mode", "the generator gets GPUs of this run (cluster.generation_workers), not a server's")
    if given.get("loss_type") == "vespo":
        new.differ(
            "loss_type", "the weight of a response is that against the sampler, which needs no further correction"
        )
    elif given.get("vllm_importance_sampling_correction", True):
        _correction(given, new)


def _correction(given: Given, new: Pieces) -> None:
    level, _, kind = str(given.get("vllm_importance_sampling_mode", "sequence_mask")).partition("_")
    low = given.number("vllm_importance_sampling_clip_min", 0.0)
    high = given.number("vllm_importance_sampling_clip_max", given.number("vllm_importance_sampling_cap", 3.0))
    bound = {"mask": "high", "truncate": "cap"}.get(kind)
    if bound is None or level not in ("token", "sequence"):
        new.miss("vllm_importance_sampling_mode", f"the importance correction {level}_{kind}")
        return
    name = "icepop" if kind == "mask" else "truncated"
    new.put("importance_correction", {"kind": name, "per": level, "low": low, bound: high})


def rewards(given: Given, new: Pieces) -> None:
    named = given.get("reward_funcs", [])
    named = named if isinstance(named, list) else [named]
    if given.has("reward_model_name_or_path"):
        new.put("environment", {"name": "reward_model", "model": given.get("reward_model_name_or_path")})
        if named:
            new.miss("reward_funcs", "a reward model and functions together (write the environment `weighted`)")
    elif len(named) == 1 and str(named[0]) in REWARDS:
        new.put("environment", REWARDS[str(named[0])])
    elif named:
        new.miss("reward_funcs", f"the reward {named[0]} by name (register it, or pass reward_fn in Python)")
    if given.has("reward_weights") and len(named) < 2 and given.get("reward_weights") != [1.0]:
        new.miss("reward_weights", "weights of rewards that are not named (the environment `weighted` has them)")


OWN_KNOBS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "sapo": {"tau_positive": ("sapo_temperature_pos", 1.0), "tau_negative": ("sapo_temperature_neg", 1.05)},
    "vespo": {
        "k_positive": ("vespo_k_pos", 2.0),
        "lambda_positive": ("vespo_lambda_pos", 3.0),
        "k_negative": ("vespo_k_neg", 3.0),
        "lambda_negative": ("vespo_lambda_neg", 2.0),
    },
}
"""Losses with knobs of their own, which are algorithms here: knob -> TRL's key, and its default there."""


def grpo(given: Given, new: Pieces) -> None:
    """The algorithm, its advantage and its loss."""
    if given.family != "grpo":
        return
    scale = str(given.get("scale_rewards", "group")).lower()
    if scale == "batch":
        new.miss("scale_rewards", "advantages divided by the spread of the batch")
    divides = scale in ("group", "true", "batch")
    kind, level = str(given.get("loss_type", "dapo")), str(given.get("importance_sampling_level", "token"))
    _algorithm(given, new, kind, level, divides)
    if new.values["algorithm"] != "dr_grpo":
        common.advantage(new, "trl", divides=divides)
    low = given.number("epsilon", 0.2)
    high = given.number("epsilon_high", low)
    unbiased = bool(given.get("use_bias_correction_kl", True))
    clipping = {"clip_low": low, "clip_high": high, "dual_clip": given.get("delta")}
    kl = {
        "kl_in": "loss",
        "kl_type": "k3",
        "kl_gradient": "unbiased" if unbiased else "estimator",
        "kl_importance_weights": "old" if unbiased else False,
        "kl_input_clamp": 40.0,
        "kl_output_clamp": None,
    }
    aggregation = {"loss_aggregation": "sequence" if kind == "grpo" else "token"}
    beta = given.number("beta", 0.0)
    algorithm = new.values["algorithm"]
    if algorithm == "grpo":
        common.loss(new, "trl", {**clipping, **kl, **aggregation}, beta)
    elif algorithm == "cispo":
        new.put("ratio_cap", high)
        common.loss(new, "trl", kl, beta)
    elif algorithm in ("gspo", "luspo"):
        common.loss(new, "trl", {"clip_low": low, "clip_high": high, **kl}, beta)
    elif algorithm in OWN_KNOBS:
        for knob, (key, default) in OWN_KNOBS[algorithm].items():
            new.put(knob, given.number(key, default))
        common.loss(new, "trl", kl, beta)
    else:
        common.clip(new, low, high, given.get("delta"))


GRPO_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")
"""All of TRL 1.16."""
DPO_ALTERNATIVES: Mapping[str, str] = {
    "sigmoid_norm": "`algorithm: simpo` averages over tokens, without a reference",
    "bco_pair": "`algorithm: kto` judges answers one by one, against a point of reference",
    "aot_unpaired": "`algorithm: kto` learns from answers that are not in pairs",
    "robust": "`loss: ipo` is not driven to extremes by labels that are wrong",
    "sppo_hard": "`loss: ipo` regresses on the difference too",
    "sft": "`algorithm: sft`, or `orpo`, which learns from both sides",
}
"""Losses of DPO that TRL has beside ours, and what comes closest."""


def _algorithm(given: Given, new: Pieces, kind: str, level: str, divides: bool) -> None:
    if level == "sequence":
        new.put("algorithm", "luspo" if kind == "luspo" else "gspo")
        if kind not in ("grpo", "luspo"):
            new.miss("loss_type", f"one ratio per response with the average of {kind} (gspo averages over responses)")
        if given.has("delta"):
            new.miss("delta", "a second bound on the ratio of a response")
    elif kind == "cispo" or kind in OWN_KNOBS:
        new.put("algorithm", kind)
    elif kind == "dr_grpo":
        new.put("algorithm", "dr_grpo")
        if divides:
            new.miss("scale_rewards", "dr_grpo's average with a division by the spread (scale_rewards: none has none)")
        if given.number("beta", 0.0):
            new.miss("beta", "a KL in dr_grpo")
    elif kind == "bnpo":
        new.differ("loss_type", "the average is over the tokens of an optimizer step, not of a device's batch")
    elif kind not in ("grpo", "dapo"):
        new.miss("loss_type", f"the loss {kind}: one of {', '.join(GRPO_LOSSES)}")


def dpo_loss(given: Given, new: Pieces) -> None:
    if given.family != "dpo":
        return
    kind = given.get("loss_type", "sigmoid")
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds == ["sigmoid"] or (len(kinds) == 1 and kinds[0] in ("hinge", "ipo")):
        new.put("loss", kinds[0])
    else:
        close = DPO_ALTERNATIVES.get(str(kinds[0])) if len(kinds) == 1 else None
        new.miss("loss_type", f"the loss {', '.join(map(str, kinds))} ({close or 'sigmoid, hinge and ipo are known'})")


def kto(given: Given, new: Pieces) -> None:
    if given.family != "kto":
        return
    order = given.get("train_sampling_strategy", "sequential")
    new.put("shuffle", order != "sequential")
    if order not in ("sequential", "random"):
        new.differ("train_sampling_strategy", "rows come in a random order")
    new.differ(
        "per_device_train_batch_size",
        "the reference point is estimated once per step on all its rows, not on each device's batch",
    )


def reference_free(given: Given, new: Pieces) -> None:
    """ORPO, and CPO of which SimPO is one loss."""
    if given.family == "orpo":
        new.put("prompt_loss", True)
    elif given.family == "cpo":
        new.put("algorithm", "simpo")
        kind = given.get("loss_type", "sigmoid")
        if kind != "simpo":
            new.miss("loss_type", f"the loss {kind} of CPO (SimPO's is loss_type: simpo)")


def assistant(given: Given, new: Pieces) -> None:
    if given.family == "sft" and not given.get("assistant_only_loss", False):
        new.differ("assistant_only_loss", "of a conversation, what the assistant says is learnt and nothing else")


def optimizer(given: Given, new: Pieces) -> None:
    new.put("policy.optimizer.lr", given.number("learning_rate", 2e-5 if given.family == "sft" else 1e-6))
    new.put("policy.optimizer.betas", [given.number("adam_beta1", 0.9), given.number("adam_beta2", 0.999)])
    options = given.get("lr_scheduler_kwargs", {})
    rate = new.values["policy.optimizer.lr"]
    given_floor = Given(given.system, options if isinstance(options, dict) else {})
    floor = given_floor.number("min_lr_rate", given_floor.number("min_lr", 0.0) / rate if rate else 0.0)
    common.schedule(
        new,
        "lr_scheduler_type",
        given.word("lr_scheduler_type", "linear"),
        warmup=given.number("warmup_steps", 0) or given.number("warmup_ratio", 0),
        floor=floor,
    )
    recomputes = bool(given.get("activation_checkpointing", given.get("gradient_checkpointing", True)))
    new.put("policy.activation_checkpointing", recomputes)


def loop(given: Given, new: Pieces) -> None:
    if given.number("max_steps", -1) > 0:
        updates = _updates(given, new)
        new.put(
            "max_steps", common.divided(new, "max_steps", given.number("max_steps", -1), updates, "a number of steps")
        )
        return
    epochs = given.number("num_train_epochs", 3.0)
    if epochs != int(epochs):
        new.miss("num_train_epochs", "a part of an epoch (set max_steps)")
    new.put("max_epochs", max(1, int(epochs)))


def validation(given: Given, new: Pieces) -> None:
    strategy = given.get("eval_strategy", "no")
    if strategy == "epoch":
        new.miss("eval_strategy", "validation once an epoch")
    every = _period(given, new, "eval_steps", given.number("logging_steps", 10)) if strategy == "steps" else 0
    new.put("validation.every", every)
    if not every:
        new.put("validation.at_end", False)
        return
    if given.family == "grpo":
        new.put("validation.num_generations", given.whole("num_generations_eval", given.number("num_generations", 8)))
        new.put("validation.temperature", given.number("temperature", 1.0))
    new.put("validation.max_samples", common.ALL_ROWS)


def checkpoints(given: Given, new: Pieces) -> None:
    strategy = given.get("save_strategy", "steps")
    if strategy in ("epoch", "best"):
        new.miss("save_strategy", f"checkpoints at each {strategy}")
    new.put("checkpoint.every", _period(given, new, "save_steps", 500) if strategy == "steps" else 0)
    if given.has("save_total_limit"):
        new.put("checkpoint.keep_last", given.whole("save_total_limit", 1))
    elif strategy == "steps":
        new.put("checkpoint.keep_every", new.values["checkpoint.every"])
    if given.get("save_only_model", False):
        new.put("checkpoint.save_optimizer", False)


def loggers(given: Given, new: Pieces) -> None:
    named = given.get("report_to", "none")
    made: list[dict[str, Any]] = []
    for name in named if isinstance(named, list) else [named]:
        if name in ("wandb", "swanlab"):
            options = {"project": given.get("project"), "run_name": given.get("run_name")}
            made.append({"name": name, **{key: value for key, value in options.items() if value is not None}})
        elif name in ("tensorboard", "mlflow"):
            made.append({"name": name})
        elif name not in ("none", "all"):
            new.differ("report_to", f"no logger {name} is known; metrics are in metrics.jsonl")
    new.put("loggers", made)


PARTS = (
    precision,
    common.attention,
    adapters,
    data,
    lengths,
    batches,
    sampling,
    vllm,
    rewards,
    grpo,
    dpo_loss,
    kto,
    reference_free,
    assistant,
    optimizer,
    loop,
    validation,
    checkpoints,
    loggers,
)
