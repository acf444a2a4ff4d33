"""The models of a run: training backend, LoRA, optimizer and schedule; teacher and critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl_compat.conversions.gym import chat_template, template_options
from nemorl_compat.conversions.pieces import Pieces, put_mapped
from nemorl_compat.features import MEDIA_ON_MEGATRON
from nemorl_compat.key_table import CRITICS_OWN, judge
from nemorl_compat.old_config import OldConfig

MEGATRON_SIZES = {
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
}
MEGATRON_STAGES = {
    "num_layers_in_first_pipeline_stage": "layers_in_first_stage",
    "num_layers_in_last_pipeline_stage": "layers_in_last_stage",
    "account_for_embedding_in_pipeline_split": "embedding_counts_as_layer",
    "account_for_loss_in_pipeline_split": "head_counts_as_layer",
}
"""How stages of unequal size are described; it means nothing where there is no pipeline."""
MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's names of linear layers, and transformers' of what they hold."""
USUAL_BALANCE_LOSS = 0.001
"""Coefficient of Megatron-Bridge's mixtures. NeMo RL reads none from its config."""
NEAR_ZERO = 0.01
"""Share of the peak rate that a warm-up may start at to count as starting at 0."""
ONE_RULE = "another scheduler of PyTorch than LinearLR, CosineAnnealingLR and ConstantLR"


def backend(old: OldConfig, new: Pieces) -> None:
    """One name instead of a switch per backend; the settings of the one that is off mean nothing."""
    is_megatron = bool(old.get("policy.megatron_cfg.enabled"))
    settings = f"policy.{'megatron' if is_megatron else 'dtensor'}_cfg"
    new.put("policy.backend", "megatron" if is_megatron else "dtensor")
    if is_megatron and old.asks_for_media:
        new.miss("policy.megatron_cfg.enabled", MEDIA_ON_MEGATRON)
    checkpointing = old.get(f"{settings}.activation_checkpointing", False)
    new.put("policy.activation_checkpointing", checkpointing)
    width_key = f"{settings}.{'tensor_model_parallel_size' if is_megatron else 'tensor_parallel_size'}"
    width = old.get(width_key, 1)
    new.put("policy.tensor_parallel_size", width)
    rows, limit = old.get("policy.train_micro_batch_size"), old.get("policy.max_total_sequence_length")
    if isinstance(rows, int) and isinstance(limit, int):  # the size that ran there
        new.put("policy.microbatch_tokens", rows * limit)
    if width not in (1, None):
        # Of a mixture whose experts are divided, each rank routes its own tokens.
        divides = not is_megatron and old.get(f"{settings}.expert_parallel_size") not in (1, None)
        new.put("policy.backend.sequence_parallel", divides or old.get(f"{settings}.sequence_parallel", False))
    if is_megatron:
        has_stages = old.get(f"{settings}.pipeline_model_parallel_size") not in (1, None)
        for theirs, ours in (MEGATRON_SIZES | (MEGATRON_STAGES if has_stages else {})).items():
            new.put_given(f"policy.backend.{ours}", old.get(f"{settings}.{theirs}"))
        new.put_given(
            "policy.backend.distributed_optimizer", old.get(f"{settings}.optimizer.use_distributed_optimizer")
        )
        if old.get(f"{settings}.optimizer.optimizer_cpu_offload"):
            new.put("policy.backend.offload.optimizer", True)
        if old.get(f"{settings}.mtp_num_layers"):
            for name in ("num_layers", "loss_scaling_factor", "detach_heads", "use_repeated_layer"):
                new.put_given(f"policy.backend.mtp.{name}", old.get(f"{settings}.mtp_{name}"))
        if old.mixture:
            new.put_given("policy.backend.freeze_moe_router", old.get(f"{settings}.freeze_moe_router"))
            scored = {"fp32": "float32", "fp64": "float64"}.get(str(old.get(f"{settings}.moe_router_dtype")))
            new.put_given("policy.backend.router.dtype", scored)
            _router(old, new, settings)
        return
    new.put_given("policy.backend.context_parallel_size", old.get(f"{settings}.context_parallel_size"))
    if old.get(f"{settings}.cpu_offload"):
        new.put("policy.backend.offload.parameters", True)
    new.put_given("policy.backend.data_parallel_replicas", old.get(f"{settings}.dp_replicate_size"))
    new.put_given("policy.backend.expert_parallel_size", old.get(f"{settings}.expert_parallel_size"))
    scored = str(old.get(f"{settings}.automodel_kwargs.backend.gate_precision")).removeprefix("torch.")
    if scored in ("float32", "float64"):
        new.put("policy.backend.router.dtype", scored)
    new.put_given("policy.backend.logprob_chunk_tokens", old.get("policy.logprob_chunk_size"))
    kernel = old.get(f"{settings}.automodel_kwargs.attn_implementation")
    if kernel in ("eager", "sdpa", "flash_attention_2"):
        new.put("policy.backend.attn_implementation", kernel)


def _router(old: OldConfig, new: Pieces, settings: str) -> None:
    """What keeps experts evenly loaded: a bias that moves, an auxiliary loss, or nothing."""
    if old.router_bias:
        new.put_given("policy.backend.router.bias_update_rate", old.get(f"{settings}.moe_router_bias_update_rate"))
    kind = old.get(f"{settings}.moe_router_load_balancing_type")
    if kind in ("aux_loss", "seq_aux_loss"):
        new.put("policy.backend.router.balance_loss", USUAL_BALANCE_LOSS)
    if kind == "aux_loss":
        new.differ(f"{settings}.moe_router_load_balancing_type", "the loss is of each sequence, not of a microbatch")


def tokenizer(old: OldConfig, new: Pieces) -> None:
    """How text becomes tokens, and what of the model's own config is changed."""
    if old.processor_writes:
        new.put_given("policy.hf_config_overrides", old.get("policy.hf_config_overrides"))
        return
    if old.has("policy.tokenizer.chat_template"):
        template = old.get("policy.tokenizer.chat_template")
        new.put("policy.tokenizer.chat_template", "passthrough" if template is None else template)
        if template == "default":
            new.put("policy.tokenizer.chat_template", None)
    new.put_given("policy.tokenizer.chat_template", chat_template(old))
    options = old.get("policy.tokenizer.chat_template_kwargs") or {}
    if isinstance(options, Mapping):  # what is none goes on as it is, to be refused
        options = {**options, **template_options(old)}
    new.put_given("policy.tokenizer.chat_template_kwargs", options or None)
    new.put_given("policy.hf_config_overrides", old.get("policy.hf_config_overrides"))


def lora(old: OldConfig, new: Pieces) -> None:
    """Adapters, where they are turned on."""
    is_megatron = old.get("policy.megatron_cfg.enabled")
    path = "policy.megatron_cfg.peft" if is_megatron else "policy.dtensor_cfg.lora_cfg"
    if not old.get(f"{path}.enabled"):
        return
    for theirs, ours in {"dim": "rank", "alpha": "alpha", "dropout": "dropout"}.items():
        new.put_given(f"policy.lora.{ours}", old.get(f"{path}.{theirs}"))
    modules = old.get(f"{path}.target_modules")
    everywhere = old.get(f"{path}.match_all_linear", False) or not modules
    if is_megatron and not everywhere:
        layers = old.texts(f"{path}.target_modules")
        if not set(layers) <= MEGATRON_LAYERS.keys():
            new.miss(f"{path}.target_modules", "LoRA of these layers of Megatron")
        modules = [name for layer in layers for name in MEGATRON_LAYERS.get(layer, ())]
    new.put("policy.lora.target_modules", "all-linear" if everywhere else modules)


def optimizer(old: OldConfig, new: Pieces) -> None:
    """The schedule of either backend, and of Megatron's optimizer what its scheduler has the last word on."""
    if not old.get("policy.megatron_cfg.enabled"):
        _torch_schedule(old, new, "policy.scheduler", "policy.schedule", old.get("policy.optimizer.kwargs.lr"))
        return
    settings, schedule = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    decay = old.get(f"{schedule}.end_weight_decay", old.get(f"{settings}.weight_decay"))
    new.put_given("policy.optimizer.weight_decay", decay)
    betas = old.get(f"{settings}.adam_beta1", 0.9), old.get(f"{settings}.adam_beta2", 0.999)
    new.put("policy.optimizer.betas", list(betas))
    if old.has(f"{settings}.clip_grad"):
        new.put("policy.max_grad_norm", old.get(f"{settings}.clip_grad") or None)
    style = old.get(f"{schedule}.lr_decay_style") or "constant"
    new.put("policy.schedule.kind", style if style in ("linear", "cosine") else "constant")
    new.put_given("policy.schedule.warmup_steps", old.get(f"{schedule}.lr_warmup_iters"))
    if style != "constant":
        new.put_given("policy.schedule.decay_steps", old.get(f"{schedule}.lr_decay_iters"))
        _put_floor(new, old.get(f"{settings}.min_lr"), old.get(f"{settings}.lr"))


def _put_floor(new: Pieces, floor: Any, rate: Any) -> None:
    if isinstance(floor, int | float) and isinstance(rate, int | float) and rate > 0:
        new.put("policy.schedule.min_lr_frac", floor / rate)


def _torch_schedule(old: OldConfig, new: Pieces, key: str, target: str, rate: Any) -> None:
    """A warm-up and a decay out of PyTorch's list of schedulers."""
    given = old.get(key)
    listed = given if isinstance(given, list) else [given]
    parts = [part for part in listed if isinstance(part, Mapping)]
    if len(parts) < len(listed) and given is not None:
        new.miss(key, ONE_RULE)
    warmup, decays = 0, 0
    for part in parts:
        kind, options = str(part.get("name", "")).rpartition(".")[2], OldConfig(part)
        start, end = options.number("kwargs.start_factor", 1 / 3), options.number("kwargs.end_factor", 1.0)
        if kind == "LinearLR" and start < end and not decays:
            warmup = options.whole("kwargs.total_iters", 5)
            new.put(f"{target}.warmup_steps", warmup)
            if start > NEAR_ZERO:
                new.differ(key, "the warm-up starts at a rate of 0")
        elif kind == "LinearLR" and start == 1.0:
            decays = options.whole("kwargs.total_iters", 5)
            new.put(f"{target}.kind", "linear")
            new.put(f"{target}.min_lr_frac", end)
        elif kind == "CosineAnnealingLR":
            decays = options.whole("kwargs.T_max", 0)
            new.put(f"{target}.kind", "cosine")
            peak = rate if isinstance(rate, int | float) and rate > 0 else 1.0
            new.put(f"{target}.min_lr_frac", options.number("kwargs.eta_min", 0.0) / peak)
        elif kind == "ConstantLR" and options.number("kwargs.factor", 1 / 3) != 1.0:
            new.miss(key, "a constant part of a schedule below the full rate")
        elif kind not in ("ConstantLR", ""):
            new.miss(key, ONE_RULE)
    if decays:
        new.put(f"{target}.decay_steps", decays + warmup)


def teacher(old: OldConfig, new: Pieces) -> None:
    """The teacher of a distillation: its model and its layout, nothing of how it would be trained."""
    if old.family != "distillation":
        return
    student = Pieces()
    backend(old.standing_for("teacher"), student)
    new.put_given("teacher.model", old.get("teacher.model_name"))
    new.put_given("teacher.precision", old.get("teacher.precision"))
    for path, value in student.values.items():
        if path.startswith(("policy.backend", "policy.tensor_parallel_size")):
            new.put(path.replace("policy.", "teacher.", 1), value)


def critic(old: OldConfig, new: Pieces) -> None:
    """The critic of PPO: its own settings, read as if they were the policy's. What is unset is as the policy has it."""
    if old.family != "ppo":
        return
    standing, own = old.standing_for("value"), Pieces()
    put_mapped(
        standing,
        own,
        {key: judge(standing, key, value) for key, value in standing.leaves.items() if key.startswith("policy.")},
    )
    for part in (backend, optimizer):
        part(standing, own)
    settings = {path: value for path, value in own.values.items() if path.startswith("policy.")}
    shared = ("policy.backend", "policy.precision", "policy.tensor_parallel_size", "policy.activation_checkpointing")
    for setting in shared:
        ours, theirs = (
            {path: value for path, value in values.items() if f"{path}.".startswith(f"{setting}.")}
            for values in (settings, new.values)
        )
        if ours == theirs:
            settings = {path: value for path, value in settings.items() if path not in ours}
    for path, value in settings.items():
        setting = path.removeprefix("policy.")
        if setting.split(".")[0] in CRITICS_OWN:
            new.put(f"critic.{setting}", value)
    for key, found in own.findings.items():
        new.findings.setdefault(key.replace("policy.", "value.", 1), found)
