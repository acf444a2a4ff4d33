"""GSPO: the unit that is rewarded, the response, is also the unit whose ratio is taken and clipped.

arXiv:2507.18071. The objective is in ``loss_gspo.py``; advantages are GRPO's.

Differs from the paper: std is the unbiased one; an ``importance_correction`` sees one log ratio per response, the mean
of its tokens' (see the loss); a KL penalty can be added. The bounds are the paper's, nearly a thousand times tighter
than GRPO's, because a mean over many tokens moves less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl.errors import ConfigIssue
from nemorl_rl.policy_gradient.config import ImportanceCorrection, PolicyGradientConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

from nemorl_grpo.config import GroupNormalization

if TYPE_CHECKING:
    from nemorl_tensors import LossAggregation

    from nemorl_grpo.loss_gspo import SequenceRatioLoss


class GSPOConfig(GroupNormalization, PolicyGradientConfig):
    """Group sequence policy optimisation (arXiv:2507.18071)."""

    summary: ClassVar[str] = "GRPO with one clipped ratio per response"
    trainer: ClassVar[str] = "nemorl_grpo.variants.gspo:GSPOTrainer"

    algorithm: Literal["gspo"] = "gspo"
    """Name of the algorithm."""
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """The ratio of a response, the geometric mean of its tokens', is clipped below at 1 - this."""
    clip_high: float = Field(4e-4, ge=0)
    """The ratio of a response is clipped above at 1 + this. Short responses need more room."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from judges_tokens(self.importance_correction)

    @property
    def averages_over(self) -> LossAggregation:
        return "sequence"

    def build_loss(self, **options: Any) -> SequenceRatioLoss:
        from nemorl_grpo.loss_gspo import SequenceRatioLoss

        return SequenceRatioLoss(self.clip_low, self.clip_high, **options)


class GSPOTrainer(PolicyGradientTrainer[GSPOConfig]):
    """Group sequence policy optimisation (arXiv:2507.18071)."""

    config_class = GSPOConfig


def judges_tokens(correction: ImportanceCorrection | None) -> Iterator[ConfigIssue]:
    """A correction by the probabilities of tokens beside a loss that knows one ratio per response."""
    if correction is not None and correction.kind == "kpop":
        message = "kpop judges tokens by their probability, and this loss has one ratio per response"
        yield ConfigIssue("importance_correction", message, "use icepop or sequence_mask")
