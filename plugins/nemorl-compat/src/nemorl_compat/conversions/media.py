"""Environments of recipes for images and audio: lists of reward functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.key_table import Outcome
from nemorl_compat.old_config import OldConfig

ENVIRONMENTS = ("vlm", "clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny", "avqa", "audiomcq", "daily-omni")
"""Names of environments that have a list of reward functions."""
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "format": {"think_tag": "think", "answer_tag": "answer"},
    "exact_alnum": {"answer_tag": "tag"},
    "math_expr": {"tag": "tag"},
    "bbox_giou": {"answer_tag": "tag", "giou_penalty_thres": "plain_from"},
    "geo3k": {"format_score": "format_weight"},
}
"""NeMo RL's reward functions, and the options of the environments that they are here by their arguments there."""
SHARES = {"think": 0.25, "answer": 0.75}
"""Of ``format``."""
DIFFERENCES = {
    "format": "an element that is empty or occurs twice earns nothing in `format`",
    "bbox_giou": "a box whose corners are in the wrong order earns 0 in `bbox_giou`",
}


def media_environment(old: OldConfig, new: Pieces, name: str) -> None:
    """The environment of a list of reward functions: one alone, or their weighted sum. Weights add up to 1 there."""
    key = f"env.{name}.reward_functions"
    given = old.get(key)
    functions = [item for item in given if isinstance(item, Mapping)] if isinstance(given, list) else []
    if not functions or len(functions) != len(given):
        new.miss(key, "an environment without a list of reward functions")
        return
    made = [_function(function) for function in functions]
    if wrong := next((found for found in made if isinstance(found, str)), None):
        new.miss(key, wrong)
        return
    weights = [weight for function in functions if isinstance(weight := function.get("weight"), int | float)]
    if len(weights) != len(functions) or not sum(weights):
        new.miss(key, "reward functions whose weights have no sum")
        return
    names = [str(function["name"]) for function in functions]
    new.put("environment", made[0] if len(made) == 1 else _weighted(names, made, [w / sum(weights) for w in weights]))
    if said := [DIFFERENCES[each] for each in dict.fromkeys(names) if each in DIFFERENCES]:
        new.differ(key, "; ".join(said))


def leave_out_unused(old: OldConfig, new: Pieces, used: str) -> None:
    """Reward functions of environments that no data names mean nothing."""
    for key in old.leaves:
        if key.endswith(".reward_functions") and key != f"env.{used}.reward_functions":
            new.findings.setdefault(key, Outcome("neutral", "inactive"))


def _weighted(names: list[str], made: list[Any], weights: list[float]) -> dict[str, Any]:
    unique = [f"{name}_{names[:at].count(name) + 1}" if name in names[:at] else name for at, name in enumerate(names)]
    parts = {
        name: {"environment": environment, "weight": weight}
        for name, environment, weight in zip(unique, made, weights, strict=True)
    }
    # The form of a response does not say whether it is right.
    return {
        "name": "weighted",
        "parts": parts,
        "lead": next((name for name in unique if "format" not in name), unique[0]),
    }


def _function(function: Mapping[str, Any]) -> dict[str, Any] | str:
    """One reward function as an environment, or what of it is not here."""
    name, arguments = str(function.get("name")), function.get("kwargs") or {}
    if name not in ARGUMENTS:
        return f"the reward function {name}"
    if unknown := sorted(map(str, arguments.keys() - ARGUMENTS[name].keys())):
        return f"the argument {unknown[0]} of the reward function {name}"
    options = {ours: arguments[theirs] for theirs, ours in ARGUMENTS[name].items() if theirs in arguments}
    if name == "format":
        tags = {part: options.get(part, part) for part in SHARES}
        shares = {tags[part]: share for part, share in SHARES.items()}
        return {"name": "format", "tags": list(tags.values()), "credit": "elements", "shares": shares}
    if name == "bbox_giou" and not 0 <= options.get("plain_from", 2) <= 1:
        options.pop("plain_from", None)  # no box covers another more than wholly: always generalised
    return {"name": name, **options}
