"""ORPO's knobs. Importing this module imports neither torch nor a backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from nemorl.metrics import MetricInfo
from pydantic import Field

from nemorl_preference.pair_config import LikelihoodConfig, pair_metrics, sft_metric


class ORPOConfig(LikelihoodConfig):
    """Odds ratio preference optimisation (arXiv:2403.07691): SFT and preferences in one stage, without a reference."""

    summary: ClassVar[str] = "Supervised fine-tuning and preferences in one stage, without a reference (odds ratio)"
    trainer: ClassVar[str] = "nemorl_preference.orpo.trainer:ORPOTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = pair_metrics(
        sft_metric("negative log-likelihood of the chosen responses, per token"),
        "mean of beta times the mean log-prob of a token of the {side} responses",
        "both rising together: the supervised term does it all; raise `beta`",
    )

    algorithm: Literal["orpo"] = "orpo"
    """Name of the algorithm."""
    beta: float = Field(0.1, gt=0)
    """Weight of the odds ratio beside the likelihood of the chosen responses (lambda in the paper)."""
    prompt_loss: bool = False
    """Raise the likelihood of the prompts' tokens too, as TRL and the authors' code do. The paper does not."""
