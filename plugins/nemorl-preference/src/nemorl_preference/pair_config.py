"""The knobs of every algorithm that learns from pairs. Imports no torch, so that loading a config needs none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from nemorl.config import RunConfig
from nemorl.metrics import MetricInfo
from pydantic import Field


class PairConfig(RunConfig):
    """One run of an algorithm whose rows are a prompt with a chosen and a rejected response."""

    best_metric: ClassVar[str] = "validation/loss"
    best_is_highest: ClassVar[bool] = False
    needs_columns: ClassVar[tuple[frozenset[str], ...]] = (frozenset({"prompt", "chosen", "rejected"}),)

    batch_size: int = Field(32, ge=1)
    """Pairs per optimizer step."""


class LikelihoodConfig(PairConfig):
    """One run of an algorithm on pairs that has no reference, and may imitate the chosen responses."""

    loss_aggregation: Literal["token", "sequence"] = "token"
    """The likelihood term averages over all tokens of chosen responses, or over responses of their own averages."""


def sft_metric(meaning: str) -> Mapping[str, MetricInfo]:
    """The supervised term of a loss on pairs."""
    return {"sft_loss": MetricInfo("SFT loss", "nats", meaning, smooth=True)}


def pair_metrics(term: Mapping[str, MetricInfo], of_side: str, watch_for: str) -> Mapping[str, MetricInfo]:
    """Metrics of an algorithm that learns from pairs of responses, of training and of validation.

    Args:
        term: The part of its loss beside that of the pairs, by name.
        of_side: Says what the reward of one side is, with ``{side}`` in the place of ``chosen`` or ``rejected``.
        watch_for: Values of these rewards that say something is wrong.
    """
    declared = {
        "loss": MetricInfo(
            "Loss",
            meaning="the weighted sum of the terms below; `validation/loss` ranks checkpoints",
            watch_for="a rise in validation while that of training falls: the pairs are learnt by heart",
            smooth=True,
        ),
        "preference_loss": MetricInfo("Preference loss", meaning="mean loss of a pair", smooth=True),
        **term,
        "accuracy": MetricInfo(
            "Preference accuracy",
            "share",
            "share of pairs whose chosen response gets the higher reward",
            "0.5 throughout: nothing is learnt; near 1 in training alone: the pairs are learnt by heart",
            smooth=True,
        ),
        **{
            f"rewards_{side}_mean": MetricInfo(
                "Preferred and rejected", "reward", of_side.format(side=side), watch_for, smooth=True
            )
            for side in ("chosen", "rejected")
        },
        "rewards_margin_mean": MetricInfo("Reward margin", "reward", "difference of the mean rewards", smooth=True),
        "num_valid_samples": MetricInfo("Pairs", "pairs", "pairs trained on: those with trained tokens on both sides"),
    }
    return {
        **RunConfig.metrics,
        **{f"{split}/{name}": info for name, info in declared.items() for split in ("train", "validation")},
        "train/mean_length": MetricInfo("Sequence length", "tokens", "tokens per prompt and response"),
    }
