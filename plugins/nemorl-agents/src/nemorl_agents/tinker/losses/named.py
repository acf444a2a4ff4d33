"""The losses by the names and settings that clients use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError

from nemorl_agents.tinker.losses.client_loss import ClientLoss, Number
from nemorl_agents.tinker.losses.loss_cispo import CISPOLoss
from nemorl_agents.tinker.losses.loss_cross_entropy import CrossEntropyLoss
from nemorl_agents.tinker.losses.loss_dro import DROLoss
from nemorl_agents.tinker.losses.loss_gspo import GSPOTokenLoss
from nemorl_agents.tinker.losses.loss_importance_sampling import ImportanceSamplingLoss
from nemorl_agents.tinker.losses.loss_ppo import PPOClipLoss

LOSSES: Mapping[str, type[ClientLoss]] = MappingProxyType(
    {
        "cross_entropy": CrossEntropyLoss,
        "importance_sampling": ImportanceSamplingLoss,
        "ppo": PPOClipLoss,
        "cispo": CISPOLoss,
        "dro": DROLoss,
        "gspo": GSPOTokenLoss,
    }
)
NOT_SERVED: Mapping[str, str] = MappingProxyType(
    {
        "stable_reinforce": "its objective is not published; use importance_sampling or cispo",
        "custom": "pass a function to forward_backward_custom: it runs in the client",
    }
)
"""Losses of the API that this server does not have, and what to do instead."""


def loss_named(name: str, config: Mapping[str, float | str] | None = None) -> ClientLoss:
    """A loss by the client's ``loss_fn`` and ``loss_fn_config``.

    Raises:
        UsageError: There is no such loss or setting, or the value is none of it; names the closest that there is.

    Example:
        >>> loss_named("ppo", {"clip_high_threshold": 1.28}) == PPOClipLoss(0.8, 1.28)
        True
    """
    if name in NOT_SERVED:
        raise UsageError(f"loss {name!r} is not served", fix=NOT_SERVED[name])
    if name not in LOSSES:
        raise UsageError(f"there is no loss {shown(name)}", fix=_choice(name, LOSSES))
    kind, given = LOSSES[name], dict(config or {})
    settings: dict[str, Any] = {key: _checked(name, key, value, kind.settings) for key, value in given.items()}
    return kind(**settings)


def _checked(loss: str, key: str, value: object, settings: Mapping[str, Number]) -> float:
    if key not in settings:
        fix = _choice(key, settings) if settings else "leave loss_fn_config out"
        raise UsageError(f"loss {loss!r} has no setting {shown(key)}", fix=fix)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not settings[key].admits(torch.tensor(value, dtype=torch.float64)):
        raise UsageError(f"loss {loss!r}: {key} is {shown(value)}", fix=f"set it to {settings[key].words}")
    return float(value)  # type: ignore[arg-type]


def _choice(word: str, choices: Iterable[str]) -> str:
    choices = list(choices)
    return did_you_mean(word, choices) or f"choose one of {', '.join(choices)}"
