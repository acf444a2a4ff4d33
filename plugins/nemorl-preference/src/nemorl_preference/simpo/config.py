"""SimPO's knobs. Importing this module imports neither torch nor a backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from nemorl.metrics import MetricInfo
from pydantic import Field

from nemorl_preference.pair_config import LikelihoodConfig, pair_metrics, sft_metric


class SimPOConfig(LikelihoodConfig):
    """Simple preference optimisation (arXiv:2405.14734): log-probs per token as rewards, without a reference."""

    summary: ClassVar[str] = "Preferences by log-probs per token and a margin, without a reference (SimPO)"
    trainer: ClassVar[str] = "nemorl_preference.simpo.trainer:SimPOTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = pair_metrics(
        sft_metric("negative log-likelihood of the chosen responses, per token"),
        "mean of beta times the mean log-prob of a token of the {side} responses",
        "both falling: the chosen responses lose likelihood too; lower the learning rate, or raise `sft_loss_weight`",
    )

    algorithm: Literal["simpo"] = "simpo"
    """Name of the algorithm."""
    beta: float = Field(2.0, gt=0)
    """Scale of the rewards, which are log-probs per token: 2 to 10, far more than in DPO."""
    gamma: float = Field(1.0, ge=0)
    """By how much the chosen response's reward has to be higher. About half of ``beta``; 0 asks for no margin."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs thought to be labelled the wrong way round."""
    sft_loss_weight: float = Field(0.0, ge=0)
    """Weight of the chosen responses' negative log-likelihood. Without a reference nothing else keeps the policy from
    drifting: raise it where responses get strange."""
