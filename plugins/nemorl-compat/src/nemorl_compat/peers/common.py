"""Parts that the translations of several systems share: schedules, data by name, attention, whole numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nemorl.errors import DataError

from nemorl_compat.conversions.data import TABLES
from nemorl_compat.conversions.pieces import Pieces
from nemorl_compat.peers.reading import Given

ALL_ROWS = 1_000_000
"""More rows than any held-out set has."""


def divided(new: Pieces, key: str, total: float, by: float, what: str) -> int:
    """``total / by`` as a whole number; else the key is missing a place, and the number is rounded up."""
    share = total / by if by else 1.0
    if share < 1 or share != int(share):
        new.miss(key, f"{what} that is no whole number ({total:g} / {by:g})")
    return max(1, math.ceil(share))


def dataset(paths: Any, *, weights: Any = None, kind: str | None = None, **options: Any) -> dict[str, Any]:
    """A dataset of the hub or a file, as ``data:`` takes it; several are a mixture.

    Args:
        paths: One path or name, or several in a list or with commas between.
        weights: A number for each of several, in the same form. Unset: every row once.
        kind: ``file`` or ``huggingface``, where the system knows no other. Unset: as the path looks.
        **options: Of each of them.
    """
    named = listed(paths)
    made = [{"name": kind or _kind(path), "path": path, **options} for path in named]
    if len(made) == 1:
        return made[0]
    try:
        shares = [float(weight) for weight in listed(weights)] if weights is not None else []
    except ValueError as error:
        raise DataError(f"weights of datasets are {weights!r}", fix="write a number for each dataset") from error
    parts: list[dict[str, Any]] = [{"data": one} for one in made]
    for part, share in zip(parts, shares, strict=False):
        part["weight"] = share
    return {"name": "mixture", "parts": parts}


def pair(given: Given, key: str, default: tuple[float, float], *, low: float | None = None) -> tuple[float, float]:
    """Two numbers; where ``low`` is given, one may do, which is the upper.

    Raises:
        DataError: it is something else.
    """
    value = given.get(key, list(default))
    numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int | float)]
    if low is not None and len(numbers) == 1:
        numbers.insert(0, low)
    if len(numbers) != 2:
        raise DataError(f"{key} is {value!r}, not two numbers", fix=f"write it as {default[0]} {default[1]}")
    return float(numbers[0]), float(numbers[1])


def listed(value: Any) -> list[str]:
    """The parts of a list, or of a text with commas between."""
    return [str(one).strip() for one in (value if isinstance(value, list) else str(value).split(","))]


def _kind(path: str) -> str:
    return "file" if Path(path).suffix in TABLES or path.startswith((".", "/", "~")) else "huggingface"


def schedule(new: Pieces, key: str, kind: Any, *, warmup: float, floor: float = 0.0) -> None:
    """A schedule by transformers' name; a warm-up below 1 is a share of the run."""
    kinds = {
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
    }
    if kind not in kinds:
        new.miss(key, f"the learning-rate schedule {kind}")
        return
    if kinds[kind] != "constant":
        new.put("policy.schedule.kind", kinds[kind])
        new.put("policy.schedule.min_lr_frac", floor)
    if kind == "constant":
        return
    if 0 < warmup < 1:
        new.put("policy.schedule.warmup_frac", warmup)
    else:
        new.put("policy.schedule.warmup_steps", int(warmup))


def attention(given: Given, new: Pieces) -> None:
    """The kernel of attention, by transformers' name."""
    kernel = given.get("attn_implementation")
    if kernel in ("eager", "sdpa", "flash_attention_2"):
        new.put("policy.backend.attn_implementation", kernel)
    elif kernel is not None:
        new.differ("attn_implementation", "attention is computed by another kernel")


def lora(given: Given, new: Pieces, *, rank: str, modules: str, prefix: str, alpha: float, dropout: float) -> None:
    """Adapters: ``rank`` and ``modules`` are keys, ``prefix`` that of the others; then their defaults."""
    new.put("policy.lora.rank", given.whole(rank, 16))
    new.put("policy.lora.alpha", given.number(f"{prefix}lora_alpha", alpha))
    new.put("policy.lora.dropout", given.number(f"{prefix}lora_dropout", dropout))
    new.put("policy.lora.target_modules", given.get(modules, "all-linear"))


def advantage(new: Pieces, flavour: str, *, divides: bool) -> None:
    """GRPO's advantage in a flavour, or without its division."""
    if divides:
        new.put("advantage", flavour)
    else:
        new.put("leave_one_out", False)
        new.put("normalize_std", False)


def shared_engine(new: Pieces, key: str, width: float) -> None:
    """An engine that shares the devices of a node with training."""
    devices = new.values.get("cluster.gpus_per_node") or width
    fits = devices % width == 0
    new.put("generation.backend.tensor_parallel_size", int(width) if fits else 1)
    if not fits:
        new.differ(key, f"{width:g} do not divide the {devices} GPUs of a node: the engine has one, where it must fit")


def clip(new: Pieces, low: float, high: float, dual: float | None) -> None:
    new.put("clip_low", low)
    new.put("clip_high", high)
    new.put("dual_clip", dual)


def loss(new: Pieces, flavour: str, values: dict[str, Any], kl_penalty: float) -> None:
    """GRPO's loss: the flavour by name, where its knobs all have its values, else the knobs."""
    from nemorl.plugins import registry

    config: Any = registry().load("algorithms", "grpo").model_validate({"model": "any/model", "loss": flavour})
    is_flavour = all(getattr(config, knob) == value for knob, value in values.items())
    if is_flavour and new.values["algorithm"] == "grpo":
        new.put("loss", flavour)
    else:
        for knob, value in values.items():
            new.put(knob, value)
    if kl_penalty or config.kl_penalty or "loss" not in new.values:
        new.put("kl_penalty", kl_penalty)


def microbatches(given: Given, new: Pieces, rows: str, limit: float, *, tokens: str | None = None) -> None:
    """Microbatches of the size that ran there, where it is given: full rows, or tokens as they are.

    Args:
        given: The config.
        new: Gets ``policy.microbatch_tokens``.
        rows: Key of the rows per device.
        limit: Tokens of the longest row.
        tokens: Key of the tokens per device, where these count instead.
    """
    if tokens is not None and given.number(tokens, 0) > 0:
        new.put("policy.microbatch_tokens", given.whole(tokens, 0))
    elif tokens is None and given.number(rows, 0) > 0:
        new.put("policy.microbatch_tokens", int(given.number(rows, 0) * limit))
