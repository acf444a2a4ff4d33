"""verl's keys whose translation takes more than a new name. Defaults are those of ppo_trainer.yaml (2026-08)."""

from __future__ import annotations

from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.peers import common
from nemorl_compat.peers.reading import Given
from nemorl_compat.peers.verl_losses import ACTOR, algorithm, correction, loss
from nemorl_compat.peers.verl_training import adapters, backend, gradients, schedule

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
NESTED = {
    "data.apply_chat_template_kwargs": "policy.tokenizer.chat_template_kwargs",
    "actor_rollout_ref.model.override_config": "policy.hf_config_overrides",
}
OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
"""Where the penalty on length has been."""
NAMES = {"project": "verl_examples", "experiment": "gsm8k"}
"""verl's default names of a run."""
MEDIA = ("data.image_key", "data.video_key", "data.audio_key")


def family(given: Given) -> str | None:
    """All that is translated of verl's YAML samples."""
    return "grpo"


def data(given: Given, new: Pieces) -> None:
    most = given.whole("data.train_max_samples", -1)
    if not given.has("data.train_files"):
        if most > 0:
            new.miss("data.train_max_samples", "a number of rows without rows (data.train_files)")
        return
    options: dict[str, Any] = {"prompt_column": given.get("data.prompt_key", "prompt")}
    found = common.dataset(given.get("data.train_files"), kind="file", **options)
    if most > 0:
        if found["name"] == "file":
            found["max_rows"] = most
        else:
            new.miss("data.train_max_samples", "a number of rows of several files together")
    if given.has("data.val_files"):
        held_out = common.dataset(given.get("data.val_files"), kind="file", **options)
        if found["name"] == held_out["name"] == "file" and most <= 0:
            found["validation_path"] = held_out["path"]
        else:
            new.put("validation.data", held_out)
    new.put("data", found)


def media(given: Given, new: Pieces) -> None:
    """A config that names a column of images wants them; in one that Hydra wrote, all columns are named."""
    named = [key for key in MEDIA if given.has(key)]
    for key in named if len(named) < len(MEDIA) else []:
        new.miss(key, "images and audio")
    for key in named if len(named) == len(MEDIA) else []:
        new.differ(key, "rows with images or audio are not read")


def tokenizer(given: Given, new: Pieces) -> None:
    """Where it is, and what has keys below one: arguments of the template, overrides of the model's config."""
    named = [key for key in ("data.tokenizer", f"{MODEL}.tokenizer_path") if given.has(key)]
    new.put_given("policy.tokenizer.name", given.get(named[0]) if named else None)
    if len({str(given.get(key)) for key in named}) > 1:
        new.miss(named[1], "two tokenizers")
    for place, target in NESTED.items():
        found = {
            key.removeprefix(f"{place}."): value for key, value in given.values.items() if key.startswith(f"{place}.")
        }
        if any("." in key for key in found):
            new.miss(f"{place}.{next(key for key in found if '.' in key)}", "a nested value of a model's config")
        elif found:
            new.put(target, found)


def lengths(given: Given, new: Pieces) -> None:
    sizes = {kind: given.number(f"data.max_{kind}_length", 512) for kind in ("prompt", "response")}
    for kind, size in sizes.items():
        if given.number(f"{ROLLOUT}.{kind}_length", size) != size:
            new.miss(f"{ROLLOUT}.{kind}_length", f"another length than data.max_{kind}_length")
    total = int(sum(sizes.values()))
    if given.number(f"{ROLLOUT}.max_model_len", total) < total:
        new.miss(f"{ROLLOUT}.max_model_len", f"an engine for shorter sequences than training ({total} tokens)")
    new.put("policy.max_sequence_tokens", total)
    tokens = f"{ACTOR}.ppo_max_token_len_per_gpu" if given.get(f"{ACTOR}.use_dynamic_bsz", False) else None
    common.microbatches(given, new, f"{ACTOR}.ppo_micro_batch_size_per_gpu", total, tokens=tokens)


def batches(given: Given, new: Pieces) -> None:
    size, key = given.number("data.train_batch_size", 1024), f"{ACTOR}.ppo_mini_batch_size"
    new.put("num_minibatches", common.divided(new, key, size, given.number(key, 256), "minibatches"))
    if given.number("data.gen_batch_size", size) != size:
        new.miss("data.gen_batch_size", "another number of prompts sampled than trained on")
    samples = given.number(f"{ROLLOUT}.n", 1)
    if given.number(f"{ACTOR}.rollout_n", samples) != samples:
        new.miss(f"{ACTOR}.rollout_n", "another number of responses trained on than sampled")


def rollout(given: Given, new: Pieces) -> None:
    name = given.get(f"{ROLLOUT}.name", "vllm")
    if name not in ("vllm", "hf"):
        new.miss(f"{ROLLOUT}.name", f"rollouts by {name}")
    top_k = given.whole(f"{ROLLOUT}.top_k", -1)
    new.put("generation.top_k", top_k if top_k > 0 else None)
    if name == "vllm":
        new.put("generation.backend", "vllm")
        engine(given, new)


def engine(given: Given, new: Pieces) -> None:
    """vLLM's options, and how it is divided."""
    place = "generation.backend"
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    width = given.whole(key, 2, least=1)
    depth = given.whole(f"{ROLLOUT}.pipeline_model_parallel_size", 1, least=1)
    devices = given.number("trainer.n_gpus_per_node", 8)
    if devices % (width * depth):
        new.miss(key, f"an engine on {width * depth:g} GPUs of nodes with {devices:g}")
    new.put(f"{place}.tensor_parallel_size", int(width))
    new.put(f"{place}.pipeline_parallel_size", int(depth))
    new.put(f"{place}.expert_parallel", given.number(f"{ROLLOUT}.expert_parallel_size", 1) > 1)
    for option, default in {"gpu_memory_utilization": 0.5, "max_num_seqs": 256}.items():
        new.put(f"{place}.{option}", given.number(f"{ROLLOUT}.{option}", default))
    new.put(f"{place}.enforce_eager", bool(given.get(f"{ROLLOUT}.enforce_eager", False)))
    new.put(f"{place}.prefix_caching", bool(given.get(f"{ROLLOUT}.enable_prefix_caching", True)))
    if given.has(f"{ROLLOUT}.quantization"):
        if given.get(f"{ROLLOUT}.quantization") == "fp8":
            new.put(f"{place}.precision", "fp8")
        else:
            new.miss(f"{ROLLOUT}.quantization", "this quantization of rollouts")


def engine_arguments(given: Given, new: Pieces) -> None:
    prefix = f"{ROLLOUT}.engine_kwargs.vllm."
    made: dict[str, Any] = {}
    for key in [key for key in given.values if key.startswith(prefix)]:
        *parents, last = key.removeprefix(prefix).split(".")
        below = made
        for parent in parents:
            below = below.setdefault(parent, {})
        below[last] = given.values[key]
    if made:
        new.put("generation.backend.engine_args", made)


def logprobs(given: Given, new: Pieces) -> None:
    mode = given.get(f"{ROLLOUT}.logprobs_mode", "processed_logprobs")
    filters = given.number(f"{ROLLOUT}.top_p", 1.0) == 1.0 and given.whole(f"{ROLLOUT}.top_k", -1) <= 0
    is_plain = given.number(f"{ROLLOUT}.temperature", 1.0) == 1.0 and filters
    if mode != "processed_logprobs" and not (mode == "raw_logprobs" and is_plain):
        new.miss(f"{ROLLOUT}.logprobs_mode", f"{mode} of a distribution that sampling changes")
    elif mode != "processed_logprobs":
        new.differ(
            f"{ROLLOUT}.logprobs_mode", "at temperature 1 without top_p and top_k it is the same as processed_logprobs"
        )


def validation(given: Given, new: Pieces) -> None:
    every = given.whole("trainer.test_freq", -1)
    new.put("validation.every", max(0, every))
    new.put("validation.at_start", bool(given.get("trainer.val_before_train", True)))
    new.put("validation.at_end", every > 0)
    if given.get("trainer.val_only"):
        new.miss("trainer.val_only", "a run that only validates (`nemorl eval`)")
    sampled = bool(given.get(f"{ROLLOUT}.val_kwargs.do_sample", False))
    count = given.whole(f"{ROLLOUT}.val_kwargs.n", 1)
    if count > 1 and not sampled:
        new.differ(f"{ROLLOUT}.val_kwargs.n", "without do_sample all responses are the same: one is drawn")
    new.put("validation.num_generations", count if sampled else 1)
    new.put("validation.temperature", given.number(f"{ROLLOUT}.val_kwargs.temperature", 0.0) if sampled else 0.0)
    if sampled:
        new.put("validation.top_p", given.number(f"{ROLLOUT}.val_kwargs.top_p", 1.0))
        top_k = given.whole(f"{ROLLOUT}.val_kwargs.top_k", -1)
        new.put("validation.top_k", top_k if top_k > 0 else None)
    most = given.whole("data.val_max_samples", -1)
    new.put("validation.max_samples", most if most > 0 else common.ALL_ROWS)


def discount(given: Given, new: Pieces) -> None:
    discounts = new.values["algorithm"] == "reinforce_plus_plus"
    for key in ("algorithm.gamma", "algorithm.lam"):
        if given.number(key, 1.0) == 1.0:
            continue
        if discounts and key == "algorithm.gamma":
            new.miss(key, "rewards that are discounted token by token")
        else:
            new.differ(key, "without a critic there is nothing to discount")


def groups(given: Given, new: Pieces) -> None:
    most = given.whole("algorithm.filter_groups.max_num_gen_batches", 0)
    if most > 0 and given.get("algorithm.filter_groups.enable", False):
        new.put("rollouts.max_batches_per_step", most)


def rewards(given: Given, new: Pieces) -> None:
    named = [key for key in ("reward.reward_manager.name", "reward_model.reward_manager") if given.has(key)]
    manager = given.get(named[0]) if named else "naive"
    if manager not in ("naive", "batch", "prime", "dapo"):
        new.miss(named[0], f"the reward manager {manager}")
    for place in ("custom_reward_function", "reward.custom_reward_function"):
        if given.has(f"{place}.path"):
            path, name = given.get(f"{place}.path"), given.get(f"{place}.name", "compute_score")
            new.miss(f"{place}.path", f"a reward by path ({name} of {path}: register it and set environment)")
    for place in OVERLONG:
        if given.get(f"{place}.enable", False):
            overlong(given, new, place, manager)
        else:
            _inactive(given, new, place)


def overlong(given: Given, new: Pieces, place: str, manager: str) -> None:
    """DAPO's penalty on responses that come close to the limit."""
    if manager != "dapo":
        new.differ(f"{place}.enable", f"the reward manager {manager} has no penalty on length")
        return
    most = given.whole("data.max_response_length", 512)
    limit = f"{place.rpartition('.')[0]}.max_resp_len"
    values = {
        "max_response_tokens": given.whole(limit, most) if limit.count(".") > 1 else most,
        "buffer_tokens": given.whole(f"{place}.len", 512),
        "penalty": given.number(f"{place}.penalty_factor", 1.0),
    }
    new.put("overlong_penalty", values)


def _inactive(given: Given, new: Pieces, place: str) -> None:
    for name in ("len", "penalty_factor"):
        if given.has(f"{place}.{name}"):
            new.differ(f"{place}.{name}", f"{place}.enable is not set")


def checkpoints(given: Given, new: Pieces) -> None:
    every = max(0, given.whole("trainer.save_freq", -1))
    new.put("checkpoint.every", every)
    if given.has("trainer.max_actor_ckpt_to_keep"):
        new.put("checkpoint.keep_last", given.whole("trainer.max_actor_ckpt_to_keep", 1))
    elif every:
        new.put("checkpoint.keep_every", every)
    contents = given.get(f"{ACTOR}.checkpoint.save_contents", ["optimizer"])
    new.put("checkpoint.save_optimizer", "optimizer" in common.listed(contents))
    if given.has("trainer.default_local_dir"):
        new.put("run_dir", given.get("trainer.default_local_dir"))


def loggers(given: Given, new: Pieces) -> None:
    named = given.get("trainer.logger", ["console", "wandb"])
    made: list[dict[str, Any]] = []
    for name in named if isinstance(named, list) else [named]:
        if name in ("wandb", "swanlab"):
            project, run_name = (given.get(f"trainer.{key}_name", default) for key, default in NAMES.items())
            made.append({"name": name, "project": project, "run_name": run_name})
        elif name in ("tensorboard", "mlflow"):
            made.append({"name": name})
        elif name != "console":
            new.differ("trainer.logger", f"no logger {name} is known; metrics are in metrics.jsonl")
    new.put("loggers", made)


def cluster(given: Given, new: Pieces) -> None:
    if given.number("trainer.nnodes", 1) > 1:
        new.put("cluster.address", "auto")


PARTS = (
    data,
    media,
    tokenizer,
    lengths,
    batches,
    rollout,
    engine_arguments,
    logprobs,
    validation,
    algorithm,
    discount,
    loss,
    correction,
    schedule,
    gradients,
    backend,
    adapters,
    groups,
    rewards,
    checkpoints,
    loggers,
    cluster,
)
