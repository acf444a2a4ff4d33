"""How verl trains the policy: its engine and layout, precision, adapters, schedule and gradients."""

from __future__ import annotations

from collections.abc import Sequence

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.peers import common
from nemorl_compat.peers.reading import Given

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
MEGATRON = {
    "tensor_model_parallel_size": "policy.tensor_parallel_size",
    "pipeline_model_parallel_size": "policy.backend.pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "policy.backend.virtual_pipeline_parallel_size",
    "context_parallel_size": "policy.backend.context_parallel_size",
    "expert_model_parallel_size": "policy.backend.expert_parallel_size",
    "expert_tensor_parallel_size": "policy.backend.expert_tensor_parallel_size",
    "sequence_parallel": "policy.backend.sequence_parallel",
    "use_distributed_optimizer": "policy.backend.distributed_optimizer",
    "override_transformer_config.num_layers_in_first_pipeline_stage": "policy.backend.layers_in_first_stage",
    "override_transformer_config.num_layers_in_last_pipeline_stage": "policy.backend.layers_in_last_stage",
    "override_transformer_config.account_for_embedding_in_pipeline_split": "policy.backend.embedding_counts_as_layer",
    "override_transformer_config.account_for_loss_in_pipeline_split": "policy.backend.head_counts_as_layer",
}
ULYSSES = "ulysses_sequence_parallel_size"
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
}
"""verl's names of precisions; float16 is none of nemorl's."""
ADAPTED_BY_MEGATRON = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
"""Megatron's names of all linear layers but the output head."""
FSDP_SCHEDULE: Sequence[str] = ("lr_scheduler_type", "min_lr_ratio")
MEGATRON_SCHEDULE: Sequence[str] = ("lr_decay_style", "min_lr", "lr_decay_steps")
"""Keys that each engine's scheduler reads; the shape first."""


def schedule(given: Given, new: Pieces) -> None:
    """FSDP's scheduler, or Megatron's, which has names of its own."""
    place = f"{ACTOR}.optim"
    if is_megatron(given):
        key, own, foreign = "lr_decay_style", MEGATRON_SCHEDULE, FSDP_SCHEDULE
        rate = given.number(f"{place}.lr", 1e-6)
        floor = given.number(f"{place}.min_lr", 0.0) / rate if rate else 0.0
    else:
        key = "warmup_style" if given.has(f"{place}.warmup_style") else "lr_scheduler_type"
        own, foreign = FSDP_SCHEDULE, MEGATRON_SCHEDULE
        floor = given.number(f"{place}.min_lr_ratio", 0.0)
    for name in set(foreign) - {key}:
        if given.has(f"{place}.{name}"):
            new.differ(f"{place}.{name}", "it is of the other engine's scheduler, and not read")
    kind = given.word(f"{place}.{key}", "constant")
    if kind == "constant":
        for name in own[1:]:
            if given.has(f"{place}.{name}"):
                new.differ(f"{place}.{name}", "a constant rate does not decay")
    steps = given.whole(f"{place}.lr_warmup_steps", -1)
    takes_steps = steps > 0 or (steps == 0 and not is_megatron(given))
    common.schedule(
        new,
        f"{place}.{key}",
        "constant_with_warmup" if kind == "constant" else kind,
        warmup=steps if takes_steps else given.number(f"{place}.lr_warmup_steps_ratio", 0.0),
        floor=floor,
    )
    if is_megatron(given) and given.has(f"{place}.lr_decay_steps") and kind != "constant":
        new.put("policy.schedule.decay_steps", given.whole(f"{place}.lr_decay_steps", 0))


def gradients(given: Given, new: Pieces) -> None:
    """verl reads ``optim.clip_grad``; before 2026 it read ``grad_clip``."""
    older, newer = f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad"
    bound = given.number(newer, given.number(older, 1.0))
    new.put("policy.max_grad_norm", bound)
    if given.has(newer) and given.number(older, bound) != bound:
        new.differ(older, "optim.clip_grad is what verl reads")


def is_megatron(given: Given) -> bool:
    return strategy(given)[1] == "megatron"


def strategy(given: Given) -> tuple[str, str]:
    """The key that says how the policy is trained, and what it says."""
    key = f"{ACTOR}.strategy"
    if not given.has(key) and given.has("model_engine"):
        name = given.get("model_engine")
        return "model_engine", "fsdp" if name == "dp" else name
    return key, given.get(key, "fsdp")


def backend(given: Given, new: Pieces) -> None:
    key, name = strategy(given)
    if name not in ("fsdp", "fsdp2", "megatron"):
        new.miss(key, f"training by {name}")
        return
    new.put("policy.backend", "megatron" if name == "megatron" else "dtensor")
    precision(given, new, key, name)
    for option, target in MEGATRON.items():
        other = f"{ACTOR}.megatron.{option}"
        if given.has(other) and name == "megatron":
            new.put(target, given.get(other))
        elif given.has(other):
            new.differ(other, f"the policy is trained by {name}")
    _shared_sequences(given, new, name)
    _router(given, new, name)


def _shared_sequences(given: Given, new: Pieces, name: str) -> None:
    """FSDP's ranks that share sequences. The actor's key is written over its engine's where it asks for any."""
    keys = [key for key in (f"{ACTOR}.{ULYSSES}", f"{ACTOR}.fsdp_config.{ULYSSES}") if given.has(key)]
    if name == "megatron":
        for key in keys:
            new.differ(key, f"the policy is trained by {name}")
    elif keys:
        asked = [given.whole(key, 1, least=1) for key in keys]
        new.put("policy.backend.context_parallel_size", next((size for size in asked if size > 1), 1))


def _router(given: Given, new: Pieces, name: str) -> None:
    key = f"{ACTOR}.megatron.override_transformer_config.moe_router_dtype"
    said = given.get(key)
    if said is not None and name != "megatron":
        new.differ(key, f"the policy is trained by {name}")
    elif said is not None:
        new.put("policy.backend.router.dtype", {"fp32": "float32", "fp64": "float64"}.get(said))
        if said not in ("fp32", "fp64"):
            new.miss(key, f"a router in {said}")


def precision(given: Given, new: Pieces, key: str, name: str) -> None:
    section = f"{ACTOR}.megatron" if name == "megatron" else f"{ACTOR}.fsdp_config"
    computes = [other for other in ("mixed_precision.param_dtype", "dtype") if given.has(f"{section}.{other}")]
    dtype = given.word(f"{section}.{computes[0]}", "") if computes else "bfloat16"
    kept = given.word(f"{section}.model_dtype", "fp32")
    for other, value in ((computes[0] if computes else "dtype", dtype), ("model_dtype", kept)):
        if value not in DTYPES:
            new.miss(f"{section}.{other}", f"training in {value}")
    for other in (f"{ACTOR}.{one}" for one in ("megatron.dtype", "fsdp_config.dtype", "fsdp_config.model_dtype")):
        if not other.startswith(section) and given.has(other):
            new.differ(other, f"the policy is trained by {name}")
    new.put("policy.precision", DTYPES.get(dtype, "bfloat16"))
    if name == "megatron" or new.values["policy.precision"] == "float32":
        return
    if DTYPES.get(kept) == "float32":
        new.differ(
            f"{section}.model_dtype" if given.has(f"{section}.model_dtype") else key,
            "weights are kept in bfloat16 (policy.precision); verl keeps float32 and computes in bfloat16",
        )
    else:
        new.differ(
            f"{section}.model_dtype", "the optimizer keeps float32 weights beside those in bfloat16; verl does not"
        )


def adapters(given: Given, new: Pieces) -> None:
    """FSDP reads ``lora_rank`` and its like, Megatron the section ``lora``."""
    names = {"rank": "lora_rank", "alpha": "lora_alpha", "target_modules": "target_modules"}
    read = {name: f"{MODEL}.lora.{name}" if is_megatron(given) else f"{MODEL}.{flat}" for name, flat in names.items()}
    unread = {f"{MODEL}.lora.{name}" for name in (*names, "dropout")} | {f"{MODEL}.{flat}" for flat in names.values()}
    unread -= {*read.values(), *([f"{MODEL}.lora.dropout"] if is_megatron(given) else [])}
    rank = given.number(read["rank"], 0)
    for key in sorted(unread):
        wants = key.endswith("rank") and given.number(key, 0) > 0 and rank <= 0
        if wants:
            new.miss(key, f"adapters where verl makes none (it reads {read['rank']})")
        elif given.has(key):
            new.differ(key, f"verl reads {read['rank']} and its like")
    if rank <= 0:
        return
    new.put("policy.lora.rank", int(rank))
    new.put("policy.lora.alpha", given.number(read["alpha"], 32 if is_megatron(given) else 16))
    new.put("policy.lora.dropout", given.number(f"{MODEL}.lora.dropout", 0.0) if is_megatron(given) else 0.0)
    modules = given.get(read["target_modules"], "all-linear")
    if is_megatron(given) and modules != "all-linear" and sorted(modules) != sorted(ADAPTED_BY_MEGATRON):
        new.miss(read["target_modules"], "some of Megatron's layers adapted, others not")
    new.put("policy.lora.target_modules", "all-linear" if is_megatron(given) else modules)
