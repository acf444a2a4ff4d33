"""KTO's knobs. Importing this module imports neither torch nor a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from nemorl.config import RunConfig
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from pydantic import Field

from nemorl_preference.reference_config import REFERENCE_METRICS, ReferenceConfig

_LOGGED = {
    "loss": MetricInfo(
        "Loss",
        meaning="mean loss of a response: 0.5 at first, with weights of 1; `validation/loss` ranks checkpoints",
        watch_for="a rise in validation while that of training falls: the responses are learnt by heart",
        smooth=True,
    ),
    "accuracy": MetricInfo(
        "Accuracy",
        "share",
        "share of responses on the right side of the reference point: desirable ones above, undesirable ones below",
        smooth=True,
    ),
    "reference_point": MetricInfo(
        "Reference point",
        "nats",
        "mean log-ratio of policy and reference on mismatched responses, at least 0",
        "a steady rise: the policy leaves the reference; raise `beta` or lower the learning rate",
        smooth=True,
    ),
    **{
        f"rewards_{side}_mean": MetricInfo(
            "Desirable and undesirable",
            "reward",
            f"mean implicit reward of the {side} responses: beta times the log-ratio",
            "both falling: raise `desirable_weight`",
            smooth=True,
        )
        for side in ("desirable", "undesirable")
    },
    "num_valid_samples": MetricInfo("Responses", "responses", "responses trained on: those with trained tokens"),
}


class KTOConfig(ReferenceConfig):
    """Kahneman-Tversky optimisation (arXiv:2402.01306): learn from single responses that are labelled good or bad."""

    summary: ClassVar[str] = "Learning from single responses labelled good or bad, without pairs (KTO)"
    trainer: ClassVar[str] = "nemorl_preference.kto.trainer:KTOTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **RunConfig.metrics,
        **{f"{split}/{name}": info for name, info in _LOGGED.items() for split in ("train", "validation")},
        "train/mean_length": MetricInfo("Sequence length", "tokens", "tokens per prompt and response"),
        **REFERENCE_METRICS,
    }
    best_metric: ClassVar[str] = "validation/loss"
    best_is_highest: ClassVar[bool] = False
    needs_columns: ClassVar[tuple[frozenset[str], ...]] = (
        frozenset({"prompt", "response", "label"}),
        frozenset({"prompt", "completion", "label"}),
        frozenset({"messages", "label"}),
        frozenset({"prompt", "chosen", "rejected"}),
    )

    algorithm: Literal["kto"] = "kto"
    """Name of the algorithm."""
    beta: float = Field(0.1, gt=0)
    """How much a change of the policy's log-probs counts as reward. Higher keeps the policy nearer to the reference."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of desirable responses. Where they are fewer, raise it until ``desirable_weight`` times their number is
    1 to 1.33 times ``undesirable_weight`` times that of the others."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of undesirable responses."""
    batch_size: int = Field(32, ge=2)
    """Rows per optimizer step. A row with ``chosen`` and ``rejected`` is two responses. The drift of the policy is
    estimated from the rows of a step: 8 and more."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not self.desirable_weight and not self.undesirable_weight:
            yield ConfigIssue("desirable_weight", "both kinds weigh 0: nothing would be learnt", "use 1.0")
