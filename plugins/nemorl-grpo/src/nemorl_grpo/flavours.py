"""GRPO as other systems compute it: named values of knobs that GRPO has anyway. Importing this imports no torch.

``ADVANTAGES`` and ``LOSSES`` are the tables; ``docs/algorithms/flavours.md`` explains their rows. A flavour is written
as a word, ``advantage: trl``, or as ``advantage: {name: grpo, flavour: trl}``. It fills in the knobs that a config
leaves out. A knob that is given beside it must agree with what the flavour fixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nemorl.config import Config
from nemorl.config.base import PROBLEM
from nemorl.errors import ConfigIssue
from pydantic import GetJsonSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema, PydanticCustomError


@dataclass(frozen=True)
class Flavour:
    """How one system computes an advantage or a loss."""

    fixed: Mapping[str, Any]
    """Knob -> value, part of the formula."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """Knob -> the system's default, which a config may change: a strength, not a formula."""


_WHOLE_GROUP = {"leave_one_out": False, "normalize_std": True}
ADVANTAGES: Mapping[str, Flavour] = {
    "trl": Flavour({**_WHOLE_GROUP, "std_epsilon": 1e-4}),
    "verl": Flavour({**_WHOLE_GROUP, "std_epsilon": 1e-6}),
    "openrlhf": Flavour({**_WHOLE_GROUP, "std_epsilon": 1e-9}),
    "nemo_rl": Flavour({"leave_one_out": True, "normalize_std": True, "std_epsilon": 1e-6}),
    "prime_rl": Flavour({"leave_one_out": False, "normalize_std": False}),
}
"""Flavours of GRPO's advantage (TRL 1.16, verl 2026-01, OpenRLHF 2026-08, NeMo RL v0.7, prime-rl 2026-08)."""

_CLIPPED = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "loss_aggregation": "token"}
_K3 = {"kl_in": "loss", "kl_type": "k3"}
_DERIVATIVE = {"kl_gradient": "estimator", "kl_importance_weights": False}
LOSSES: Mapping[str, Flavour] = {
    "trl": Flavour(
        {
            **_CLIPPED,
            **_K3,
            "kl_gradient": "unbiased",
            "kl_importance_weights": "old",
            "kl_input_clamp": 40.0,
            "kl_output_clamp": None,
        },
        {"kl_penalty": 0.0},
    ),
    "verl": Flavour(
        {**_CLIPPED, "dual_clip": 3.0, **_K3, **_DERIVATIVE, "kl_input_clamp": 20.0, "kl_output_clamp": 10.0},
        {"kl_penalty": 0.0},
    ),
    "openrlhf": Flavour(
        {**_CLIPPED, **_K3, **_DERIVATIVE, "kl_input_clamp": 40.0, "kl_output_clamp": 10.0},
        {"kl_penalty": 0.01},
    ),
    "nemo_rl": Flavour(
        {
            **_CLIPPED,
            **_K3,
            "kl_gradient": "unbiased",
            "kl_importance_weights": False,
            "kl_input_clamp": 20.0,
            "kl_output_clamp": 10.0,
        },
        {"kl_penalty": 0.01},
    ),
}
"""Flavours of GRPO's loss, of the same versions."""

NO_LOSS = {
    "prime_rl": "prime-rl's loss is no clipped surrogate: it drops tokens whose probability moved too far and adds a "
    "squared log ratio",
}
"""Systems whose loss no setting of GRPO's knobs reproduces, and why."""


class _Choice(Config):
    """A flavour by name: ``trl`` for ``{name: grpo, flavour: trl}``."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return {"flavour": data} if isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


class AdvantageFlavour(_Choice):
    """An advantage as another system computes it.

    Example:
        >>> AdvantageFlavour(flavour="trl").name
        'grpo'
    """

    name: Literal["grpo"] = "grpo"
    """The advantage: GRPO's."""
    flavour: Literal["trl", "verl", "openrlhf", "nemo_rl", "prime_rl"]
    """The system whose formula it is."""


class LossFlavour(_Choice):
    """A loss as another system computes it.

    Example:
        >>> LossFlavour(flavour="verl").name
        'grpo'
    """

    name: Literal["grpo"] = "grpo"
    """The loss: GRPO's."""
    flavour: Literal["trl", "verl", "openrlhf", "nemo_rl"]
    """The system whose formula it is."""

    @field_validator("flavour", mode="before")
    @classmethod
    def _has_a_loss(cls, value: Any) -> Any:
        if isinstance(value, str) and value in NO_LOSS:
            context = {
                "message": NO_LOSS[value],
                "fix": f"use `algorithm: dppo` with `drift_penalty: 1.0e-3` and `advantage: {value}`",
            }
            raise PydanticCustomError(PROBLEM, "{message}", context)
        return value


def filled(data: Any, key: str, table: Mapping[str, Flavour]) -> Any:
    """A raw config with the knobs of the flavour under ``key`` where it has none of its own.

    Example:
        >>> filled({"advantage": "prime_rl", "leave_one_out": False}, "advantage", ADVANTAGES)["normalize_std"]
        False
    """
    choice = data.get(key) if isinstance(data, Mapping) else None
    if isinstance(choice, Mapping):
        choice = choice.get("flavour")
    elif isinstance(choice, AdvantageFlavour | LossFlavour):
        choice = choice.flavour
    flavour = table.get(choice) if isinstance(choice, str) else None
    return data if flavour is None else {**flavour.start, **flavour.fixed, **data}


def contradictions(config: Config, key: str, flavour: Flavour, name: str) -> Iterator[ConfigIssue]:
    """The knobs of a config that say something else than the flavour beside them."""
    from nemorl.base.text.yaml_text import format_yaml

    for knob, value in flavour.fixed.items():
        given = getattr(config, knob)
        if given != value:
            knobs = ", ".join(f"{knob}: {format_yaml(value, one_line=True)}" for knob, value in flavour.fixed.items())
            yield ConfigIssue(
                knob,
                f"{given} contradicts `{key}: {name}`, which has {value}",
                f"leave it out, or write the flavour out in place of `{key}:` and change that ({knobs})",
            )
