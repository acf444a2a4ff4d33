"""The knobs of every algorithm that learns from pairs. Imports no torch, so that loading a config needs none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nemorl.config import RunConfig
from nemorl.metrics import MetricInfo
from pydantic import Field


class PairConfig(RunConfig):
    """One run of an algorithm whose rows are a prompt with a chosen and a rejected response."""

    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **RunConfig.metrics,
        "train/mean_length": MetricInfo("Sequence length", "tokens", "tokens per prompt and response"),
    }
    best_metric: ClassVar[str] = "validation/loss"
    best_is_highest: ClassVar[bool] = False
    needs_columns: ClassVar[tuple[frozenset[str], ...]] = (frozenset({"prompt", "chosen", "rejected"}),)

    batch_size: int = Field(32, ge=1)
    """Pairs per optimizer step."""
