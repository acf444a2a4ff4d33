"""verl's estimators of advantages and losses by name, as algorithms here. Defaults are verl's of 2026-08."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.peers import common
from nemorl_compat.peers.reading import Given

ACTOR = "actor_rollout_ref.actor"
MODE, AVERAGE = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "optimal_token_baseline": "optimal_token_baseline",
}
OTHER_ESTIMATORS = {
    "gae": "PPO with a critic (not translated: write `algorithm: ppo`)",
    "gdpo": "the advantage gdpo (`algorithm: gdpo`, whose reward_weights name the rewards)",
    "gpg": "the advantage gpg (`algorithm: dr_grpo` has no division either)",
    "opo": "the advantage opo (`algorithm: optimal_token_baseline` weighs by token, `rloo` not at all)",
    "remax": "the advantage remax (`algorithm: rloo` has the other responses as its baseline)",
    "grpo_passk": "the advantage grpo_passk (`algorithm: maxrl` raises pass@k)",
    "tir_optimal_token_baseline": "the advantage tir_optimal_token_baseline (`algorithm: optimal_token_baseline`)",
}
"""What is known and has no counterpart, with what comes close."""
LOSSES: Mapping[str, str] = {
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dro": "dro",
}
"""Losses that are algorithms here, with GRPO's advantage."""
BY_RESPONSE = ("gspo", "sapo", "gmpo")
"""Losses that average over responses, whatever ``loss_agg_mode`` says, in verl too."""
AVERAGES = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum": "sequence_sum"}
KL_TYPES = {"low_var_kl": "k3", "k3": "k3", "k2": "k2", "mse": "k2"}


def algorithm(given: Given, new: Pieces) -> None:
    """The algorithm and its advantage."""
    estimator, mode = given.word("algorithm.adv_estimator", "gae"), given.word(MODE, "vanilla")
    if estimator not in ESTIMATORS:
        what = OTHER_ESTIMATORS.get(estimator, f"the advantage {estimator}: one of {', '.join(ESTIMATORS)}")
        default = "" if given.has("algorithm.adv_estimator") else ", verl's default"
        new.miss("algorithm.adv_estimator", f"{what}{default}")
        return
    new.put("algorithm", ESTIMATORS[estimator])
    if mode in LOSSES and ESTIMATORS[estimator] == "grpo":
        new.put("algorithm", LOSSES[mode])
    elif mode == "gpg" and _updates_once(given, new):
        new.differ(MODE, "with one update per step its gradient is that of the clipped ratio, which is 1")
    elif mode == "gpg":
        new.miss(MODE, "a policy gradient without a ratio for several updates per step (cispo keeps every token)")
    elif mode in LOSSES:
        new.miss(MODE, f"the loss {mode} with {estimator} (it has GRPO's advantage here)")
    elif mode != "vanilla":
        new.miss(MODE, f"the loss {mode}: one of vanilla, {', '.join(LOSSES)}")
    if ESTIMATORS[estimator] == "grpo":
        common.advantage(new, "verl", divides=bool(given.get("algorithm.norm_adv_by_std_in_grpo", True)))


def _updates_once(given: Given, new: Pieces) -> bool:
    return new.values.get("num_minibatches", 1) == 1 and given.number(f"{ACTOR}.ppo_epochs", 1) == 1


def loss(given: Given, new: Pieces) -> None:
    """Bounds, averages and the KL."""
    clip = given.number(f"{ACTOR}.clip_ratio", 0.2)
    low, high = given.number(f"{ACTOR}.clip_ratio_low", clip), given.number(f"{ACTOR}.clip_ratio_high", clip)
    if clip != 0.2 and not given.has(f"{ACTOR}.clip_ratio_low"):
        new.differ(
            f"{ACTOR}.clip_ratio",
            "it is taken for both bounds; verl's own defaults of clip_ratio_low and _high are 0.2",
        )
    chosen, average = new.values["algorithm"], given.word(AVERAGE, "token-mean")
    values = _bounds(given, new, chosen, low, high)
    if chosen in LOSSES.values():  # knobs of its own, which no flavour of GRPO's loss has
        for knob, value in values.items():
            new.put(knob, value)
        values = {}
    if chosen in LOSSES.values() and chosen not in ("clip_cov", *BY_RESPONSE):
        if average != "token-mean":
            new.miss(AVERAGE, f"{given.word(MODE, 'vanilla')} with the average {average}")
    elif chosen not in BY_RESPONSE:
        if average not in AVERAGES:
            new.miss(AVERAGE, f"the average {average}")
        values["loss_aggregation"] = AVERAGES.get(average, "token")
    kind = given.word(f"{ACTOR}.kl_loss_type", "low_var_kl")
    is_on = bool(given.get(f"{ACTOR}.use_kl_loss", False))
    if is_on and kind not in KL_TYPES:
        new.miss(f"{ACTOR}.kl_loss_type", f"the KL {kind} by its derivative")
    values |= {"kl_in": "loss", "kl_type": KL_TYPES.get(kind, "k3") if is_on else "k3", "kl_gradient": "estimator"}
    values |= {"kl_importance_weights": False, "kl_input_clamp": 20.0, "kl_output_clamp": 10.0}
    common.loss(new, "verl", values, given.number(f"{ACTOR}.kl_loss_coef", 0.001) if is_on else 0.0)


def _bounds(given: Given, new: Pieces, chosen: str, low: float, high: float) -> dict[str, Any]:
    """What holds back the policy, in the knobs of an algorithm."""
    options = f"{ACTOR}.policy_loss"
    if chosen == "cispo":  # bounds of a token's weight, and no second one
        return {"ratio_cap": 1 + high, "ratio_floor": max(0.0, 1 - low)}
    if chosen == "sapo":
        return {
            "tau_positive": given.number(f"{ACTOR}.tau_pos", 1.0),
            "tau_negative": given.number(f"{ACTOR}.tau_neg", 1.05),
        }
    if chosen == "dppo":
        new.differ(MODE, "probabilities are compared with the sampler's, as in the paper, not with the old policy's")
        divergence = given.word(MODE, "dppo_tv").removeprefix("dppo_")
        cap = given.number(f"{ACTOR}.clip_ratio_c", 3.0)
        return {"divergence": divergence, "divergence_low": low, "divergence_high": high, "ratio_cap": cap}
    if chosen == "dro":
        if given.number(f"{options}.dro_beta", 0.0) <= 0:
            new.miss(f"{options}.dro_beta", "dro without a positive dro_beta, which verl refuses too")
            return {}
        return {"drift_penalty": given.number(f"{options}.dro_beta", 0.1)}
    if chosen in ("clip_cov", "kl_cov"):
        new.differ(MODE, "the tokens are chosen once per step by the log-probs before it, not in each update")
        values: dict[str, Any] = {"cov_fraction": given.number(f"{options}.{chosen}_ratio", 0.0002)}
        if chosen == "kl_cov":
            return {**values, "cov_penalty": given.number(f"{options}.ppo_kl_coef", 0.1)}
        values |= {f"cov_{ours}": given.number(f"{options}.clip_cov_{end}", default) for ours, end, default in COV_ENDS}
        return {**values, "clip_low": low, "clip_high": high, "dual_clip": None}
    if chosen in BY_RESPONSE:
        return {"clip_low": low, "clip_high": high}
    return {"clip_low": low, "clip_high": high, "dual_clip": given.number(f"{ACTOR}.clip_ratio_c", 3.0)}


COV_ENDS = (("low", "lb", 1.0), ("high", "ub", 5.0))


def correction(given: Given, new: Pieces) -> None:
    """Weights of tokens that another engine sampled."""
    place = "algorithm.rollout_correction"
    cap, per = given.number(f"{ACTOR}.tis_imp_ratio_cap", -1), given.get(f"{place}.rollout_is")
    if new.values.get("algorithm") == "dppo" and (cap > 0 or per is not None):
        key = f"{place}.rollout_is" if per is not None else f"{ACTOR}.tis_imp_ratio_cap"
        new.differ(key, "DPPO's ratio is that to the sampler: nothing is left to correct")
        return
    if cap > 0:
        new.put("importance_correction", {"kind": "truncated", "cap": cap})
    if per is not None:
        bound = given.get(f"{place}.rollout_is_threshold", 2.0)
        if isinstance(bound, str):  # "low_high"
            new.miss(f"{place}.rollout_is_threshold", "importance weights that are cut at both ends")
            return
        new.put("importance_correction", {"kind": "truncated", "cap": bound, "per": per})
    if given.has(f"{place}.rollout_rs"):
        new.miss(f"{place}.rollout_rs", "rejection of responses by verl's rules")
