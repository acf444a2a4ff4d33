"""Policy-gradient losses, advantages and rewards: switches of NeMo RL that are algorithms or blocks of options here."""

from __future__ import annotations

import re
from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.old_config import OldConfig

CLIPS_RATIO = ("grpo", "ppo")
UNBOUNDED_EPOCHS = 100_000
CORRECTIONS = {"icepop": "icepop", "seq-mask-tis": "sequence_mask"}


def algorithm(old: OldConfig, new: Pieces) -> None:
    """The name of the algorithm; GRPO's variants were switches."""
    name = {"xtoken": "distillation", "eval": "grpo"}.get(old.family, old.family)
    if name == "grpo" and old.family == "grpo":
        name = _variant(old)
    new.put("algorithm", name)


def _variant(old: OldConfig) -> str:
    if old.get("loss_fn.use_cispo"):
        return "cispo"
    if old.get("loss_fn.sequence_level_importance_ratios"):
        return "gspo"
    estimator = old.get("grpo.adv_estimator.name") or "grpo"
    if estimator == "reinforce_plus_plus":
        return "reinforce_plus_plus_baseline"
    return "gdpo" if estimator == "gdpo" else "grpo"


def loop(old: OldConfig, new: Pieces) -> None:
    """How long a run is, and options of estimators."""
    steps = old.own("max_num_steps", {"sft": 60, "dpo": 150, "rm": -1, "distillation": 1000}.get(old.family))
    new.put("max_steps", None if isinstance(steps, int) and steps < 0 else steps)
    epochs = old.own("max_num_epochs", {"distillation": 10, "ppo": UNBOUNDED_EPOCHS}.get(old.family, 1))
    if epochs == -1 and old.get("ppo.async_ppo.enabled"):
        epochs = UNBOUNDED_EPOCHS  # the asynchronous loop of NeMo RL counts steps alone
    new.put_given("max_epochs", epochs)
    metric, threshold = old.own("stop_at_validation_metric"), old.own("stop_at_validation_threshold")
    if metric is not None and threshold is not None:
        name = str(metric).removeprefix("val:")
        new.put("plugins.hooks", [{"name": "early_stopping", "metric": name, "threshold": threshold}])
    if old.family == "grpo" and old.get("grpo.adv_estimator.name") == "gdpo":
        new.put_given("reward_weights", old.get("grpo.adv_estimator.reward_weights"))
    if old.family == "ppo":
        new.put_given("length_adaptive_alpha", old.get("ppo.adv_estimator.length_adaptive_alpha") or None)


def minibatches(old: OldConfig, new: Pieces) -> None:
    """Optimizer steps of a batch: its responses over those of one step."""
    size, responses = old.get("policy.train_global_batch_size"), old.responses
    if old.family not in ("grpo", "ppo", "distillation") or not isinstance(size, int) or not responses:
        return
    if size < 1 or (size < responses and responses % size):
        new.miss("policy.train_global_batch_size", f"a batch of {responses} responses in unequal steps of {size}")
    elif size < responses:
        new.put("num_minibatches", responses // size)
    elif size > responses:
        new.differ("policy.train_global_batch_size", f"the {responses} responses of a step are one optimizer step")


def loss(old: OldConfig, new: Pieces) -> None:
    """Bounds of the ratio, the KL, and the correction of the sampler."""
    if old.family == "distillation":
        new.put("outside_topk", "zero" if old.get("loss_fn.zero_outside_topk", False) else "renormalize")
    if old.family not in CLIPS_RATIO:
        return
    variant = new.values["algorithm"]
    _ratio(old, new, variant)
    by_token = old.get("loss_fn.token_level_loss", True)
    if variant == "cispo" and not by_token:
        new.miss("loss_fn.token_level_loss", "CISPO with an average over responses")
    elif variant == "gspo" and by_token:
        new.miss("loss_fn.token_level_loss", "GSPO with an average over tokens")
    elif variant not in ("cispo", "gspo"):
        new.put("loss_aggregation", "token" if by_token else "sequence")
    _kl(old, new)
    if old.get("loss_fn.use_importance_sampling_correction"):
        new.put("importance_correction", _correction(old, variant))
    elif old.fp8_rollouts:
        message = "rollouts in FP8 are corrected for by importance_correction: truncated; null turns that off"
        new.differ("loss_fn.use_importance_sampling_correction", message)


def _ratio(old: OldConfig, new: Pieces, variant: str) -> None:
    low, high = old.get("loss_fn.ratio_clip_min", 0.2), old.get("loss_fn.ratio_clip_max", 0.2)
    if variant == "cispo":
        # One bound on each side of a token's weight, where GRPO clips a ratio.
        new.put("ratio_cap", 1 + high if isinstance(high, int | float) else high)
        new.put("ratio_floor", max(0.0, 1 - low) if isinstance(low, int | float) else 0.0)
        return
    new.put("clip_low", low)
    new.put("clip_high", high)


def _kl(old: OldConfig, new: Pieces) -> None:
    if old.get("loss_fn.reference_policy_kl_penalty", 0.01) == 0:
        return
    kind = old.get("loss_fn.reference_policy_kl_type", "k3")
    in_reward = bool(old.get("loss_fn.use_kl_in_reward"))
    new.put("kl_in", "reward" if in_reward else "loss")
    usual = "k2" if new.values["algorithm"] == "reinforce_plus_plus_baseline" else "k3"
    new.put("kl_type", None if kind == ("k1" if in_reward else usual) else kind)
    bound = old.get("loss_fn.kl_input_clamp_value", 20.0)
    if bound is None:
        bound = 40.0
        new.differ("loss_fn.kl_input_clamp_value", "a log-ratio counts up to 40 nats, the most that can be set")
    new.put("kl_input_clamp", bound)
    if old.is_flat and not in_reward:
        # Until v0.7 the gradient was that of the formula alone.
        new.put("kl_gradient", "estimator")
    elif kind == "k2" and not in_reward:
        new.put("kl_gradient", "expectation")


def _correction(old: OldConfig, variant: str) -> dict[str, Any]:
    cap = old.get("loss_fn.truncated_importance_sampling_ratio")
    floor = old.get("loss_fn.truncated_importance_sampling_ratio_min")
    kind = old.get("loss_fn.truncated_importance_sampling_type") or "tis"
    per = {"per": "sequence"} if variant == "gspo" and kind != "seq-mask-tis" else {}
    if cap is None:
        return {"kind": "plain", **per}
    if kind not in CORRECTIONS:
        return {"kind": "truncated", "cap": cap, **({} if floor is None else {"low": floor}), **per}
    return {"kind": CORRECTIONS[kind], "low": 0.0 if floor is None else floor, "high": cap, **per}


def rewards(old: OldConfig, new: Pieces) -> None:
    """Shaping and scaling of rewards, and asynchrony: what is turned on by ``enabled``."""
    if old.family not in CLIPS_RATIO:
        return
    late = "grpo.async_grpo" if old.family == "grpo" else "ppo.async_ppo"
    if old.get(f"{late}.enabled"):
        new.put("rollouts.mode", "async")
        new.put("rollouts.max_staleness", old.get(f"{late}.max_trajectory_age_steps", 1))
    effort = old.get("env.nemo_gym.effort_levels")
    if isinstance(effort, dict) and effort.get("low_string") and effort.get("low_weight"):
        for name, theirs in EFFORT.items():
            new.put_given(f"low_effort.{name}", effort.get(theirs))
    if old.own("reward_shaping.enabled"):
        _shaping(old, new, f"{old.section}.reward_shaping")
    if old.own("reward_scaling.enabled"):
        ranges = {"source_min": 0.0, "source_max": 1.0, "target_min": 0.0, "target_max": 1.0}
        for name, default in ranges.items():
            new.put(f"reward_scaling.{name}", old.own(f"reward_scaling.{name}", default))


EFFORT = {"phrase": "low_string", "weight": "low_weight", "max_tokens": "low_ub", "penalty": "low_penalty"}
STALE_GROUPS = {"windowed": "drop", "ready_first": "train", "in_order": "drop"}
"""Sampler of the single-controller loop -> what becomes of a group that is older than it allows."""


def single_controller(old: OldConfig, new: Pieces) -> None:
    """How far the single-controller loop lets generation run ahead, which is its own word for asynchrony."""
    if old.family != "grpo" or not old.get("async_rl"):
        return
    sampler = old.get("async_rl.sampler.name") or "in_order"
    window = "max_lookahead_versions" if sampler == "in_order" else "max_staleness_versions"
    versions = old.get(f"async_rl.sampler.{window}", 1)
    new.put("rollouts.mode", "async" if versions else "sync")
    new.put("rollouts.max_staleness", versions)
    new.put_given("rollouts.on_stale", STALE_GROUPS.get(sampler))
    if sampler == "in_order" and versions:
        sentence = "a step learns from the groups that are ready first; too old ones are given up (rollouts.on_stale)"
        new.differ("async_rl.sampler.name", sentence)


def _shaping(old: OldConfig, new: Pieces, path: str) -> None:
    factor = old.get(f"{path}.stop_properly_penalty_coef")
    if factor is not None:
        new.put("truncation_reward_factor", factor)
        for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
            new.differ(f"{path}.{name}", "no effect beside stop_properly_penalty_coef, in NeMo RL either")
        return
    longest = old.get(f"{path}.max_response_length", old.get("policy.max_total_sequence_length"))
    new.put_given("overlong_penalty.max_response_tokens", longest)
    new.put("overlong_penalty.buffer_tokens", old.get(f"{path}.overlong_buffer_length", 128))
    new.put("overlong_penalty.penalty", old.get(f"{path}.overlong_buffer_penalty", 1.0))


def penalties(old: OldConfig, new: Pieces) -> None:
    """Tokens for which an episode earns 0, which a switch turns on, and the tags by which faults are found."""
    unwanted = old.get("reward_penalties.token_ids.unwanted")
    if old.family == "grpo" and old.get("reward_penalties.penalize_unwanted_tokens") and unwanted is not None:
        new.put("rollouts.reward_penalties.unwanted_tokens", unwanted if isinstance(unwanted, list) else [unwanted])
    if old.family == "grpo" and old.get("env.should_use_nemo_gym"):
        _gym_tags(old, new)


def _gym_tags(old: OldConfig, new: Pieces) -> None:
    """Tags of thinking and of tool calls, which NeMo RL has below NeMo-Gym and reads for its penalties."""
    tags, patterns = (old.get(f"env.nemo_gym.{name}") for name in ("thinking_tags", "invalid_tool_call_patterns"))
    uses = {
        "message_penalties": old.get("grpo.malformed_thinking_advantage") is not None,
        "rollouts.reward_penalties": old.has_penalties,
    }
    for place in [place for place, is_used in uses.items() if is_used and tags]:
        if isinstance(tags, list) and len(tags) == 2:
            new.put(f"{place}.thinking_tags", tags)
        else:
            new.miss("env.nemo_gym.thinking_tags", "think tags that are no pair")
    if patterns and old.get("grpo.invalid_tool_call_advantage") is not None:
        listed = old.texts("env.nemo_gym.invalid_tool_call_patterns")
        names = [found[1] for pattern in listed if (found := re.fullmatch(r"<(\w+)>", pattern))]
        if sorted(listed) == sorted([f"<{name}>" for name in names] + [f"</{name}>" for name in names]):
            new.put("message_penalties.tool_call_tags", names)
        else:
            new.miss(
                "env.nemo_gym.invalid_tool_call_patterns", "patterns of broken tool calls that are no pairs of tags"
            )
