"""DPO's knobs. Importing this module imports neither torch nor a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from pydantic import Field

from nemorl_preference.pair_config import PairConfig, pair_metrics, sft_metric
from nemorl_preference.reference_config import REFERENCE_METRICS, ReferenceConfig


class DPOConfig(PairConfig, ReferenceConfig):
    """Direct preference optimisation (arXiv:2305.18290): learn from pairs of responses, without sampling any."""

    summary: ClassVar[str] = "Direct preference optimisation on pairs of responses (sigmoid, hinge, IPO)"
    trainer: ClassVar[str] = "nemorl_preference.dpo.trainer:DPOTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **pair_metrics(
            sft_metric("negative log-likelihood of the chosen responses"),
            "mean implicit reward of the {side} responses: beta times the log-ratio",
            "both falling: the chosen responses lose likelihood too; raise `sft_loss_weight`",
        ),
        **REFERENCE_METRICS,
    }

    algorithm: Literal["dpo"] = "dpo"
    """Name of the algorithm."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """``sigmoid``: DPO itself. ``hinge``: no more push once a pair is 1 / ``beta`` apart. ``ipo``: pull pairs to
    1 / (2 ``beta``) apart, which does not overfit preferences that are never contradicted."""
    beta: float = Field(0.05, gt=0)
    """How much a change of the policy's log-probs counts as reward. Higher keeps the policy nearer to the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs thought to be labelled the wrong way round, for ``sigmoid``."""
    preference_loss_weight: float = Field(1.0, ge=0)
    """Weight of the preference loss."""
    sft_loss_weight: float = Field(0.0, ge=0)
    """Weight of the chosen responses' negative log-likelihood. Above 0 it stops their likelihood from falling along
    with that of the rejected ones."""
    preference_average_log_probs: bool | None = None
    """Compare log-probs per token instead of those of whole responses, against a bias to long ones; raise ``beta``
    with it. Unset: for ``ipo`` only, as its authors do."""
    sft_average_log_probs: bool = False
    """Average the chosen responses' negative log-likelihood over their tokens instead of adding it up."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.label_smoothing and self.loss != "sigmoid":
            yield ConfigIssue(
                "label_smoothing", f"{self.loss} has no label smoothing", "set it to 0, or use loss: sigmoid"
            )
        if not self.preference_loss_weight and not self.sft_loss_weight:
            yield ConfigIssue("preference_loss_weight", "both losses weigh 0: nothing would be learnt", "use 1.0")

    @property
    def averages_preference(self) -> bool:
        """``preference_average_log_probs``, decided."""
        given = self.preference_average_log_probs
        return self.loss == "ipo" if given is None else given
