"""GRPO's knobs. Importing this imports no torch.

The blocks that it and its variants are made of are in :mod:`nemorl_rl.policy_gradient.config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl.errors import ConfigIssue
from nemorl.types import Samples
from nemorl_rl.policy_gradient.advantages import group_advantages
from nemorl_rl.policy_gradient.config import ClippedConfig, RewardShaping
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from pydantic import Field, model_validator

from nemorl_grpo.flavours import ADVANTAGES, LOSSES, AdvantageFlavour, LossFlavour, contradictions, filled

if TYPE_CHECKING:
    from nemorl_rl.policy_gradient.updates import BatchTransform


class GroupNormalization(RewardShaping):
    """A block of knobs: GRPO's advantage, a reward against mean and spread of its group."""

    leave_one_out: bool = True
    """Baseline and spread of a response come from the *other* responses of its group, which keeps them unbiased."""
    normalize_std: bool = True
    """Divide by the group's standard deviation. False: hard and easy prompts keep their natural weight."""
    std_epsilon: float = Field(1e-6, ge=0, le=1)
    """Added to the standard deviation before dividing."""
    advantage: AdvantageFlavour | None = None
    """The advantage as another system computes it: ``trl``, ``verl``, ``openrlhf``, ``nemo_rl`` or ``prime_rl``. Fills
    in ``leave_one_out``, ``normalize_std`` and ``std_epsilon``."""
    credit: Literal["episode", "turn"] = "episode"
    """What learns from an episode's reward. ``episode``: all of its tokens alike. ``turn``: each answer from what was
    earned from there on, compared with the same turn of the others (``policy_gradient.turn_credit``)."""
    turn_discount: float = Field(1.0, gt=0, le=1)
    """With ``credit: turn``: by which a reward counts less for each turn that lies before it, as in AReaL."""
    weighs_whole_responses: ClassVar[bool] = False
    """The loss has one weight and one advantage for a whole response, so that turns cannot be told apart."""

    @model_validator(mode="before")
    @classmethod
    def _fill_advantage(cls, data: Any) -> Any:
        return filled(data, "advantage", ADVANTAGES)

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.turn_discount != 1 and self.credit == "episode":
            yield ConfigIssue("turn_discount", "whole episodes are credited, and nothing fades", "set credit: turn")
        if self.weighs_whole_responses and self.credit == "turn":
            what = "this loss has one advantage for all tokens of a response"
            yield ConfigIssue("credit", what, "use another algorithm, e.g. grpo, or leave it out")
        if self.advantage is not None:
            name = self.advantage.flavour
            yield from contradictions(self, "advantage", ADVANTAGES[name], name)

    @property
    def is_linear_in_rewards(self) -> bool:
        return not self.normalize_std

    def advantages(self, samples: Samples) -> list[float]:
        """Shaped rewards against mean and spread of their group, in sample order (arXiv:2402.03300)."""
        return self.compared(shaped_rewards(samples, self), samples.group_ids)

    def compared(self, values: Sequence[float], group_ids: Sequence[int]) -> list[float]:
        """Values against mean and spread of their group."""
        return group_advantages(
            values,
            group_ids,
            normalize_std=self.normalize_std,
            leave_one_out=self.leave_one_out,
            epsilon=self.std_epsilon,
        )

    def turn_credit(self, low: float | None, high: float | None, min_group: int) -> list[BatchTransform]:
        if self.credit == "episode":
            return []
        from nemorl_rl.policy_gradient.turn_credit import TurnCredit

        rewards = partial(shaped_rewards, config=self)
        return [TurnCredit(rewards, self.compared, self.turn_discount, low, high, min_group)]


class GRPOConfig(GroupNormalization, ClippedConfig):
    """Group relative policy optimisation (arXiv:2402.03300)."""

    summary: ClassVar[str] = "Group relative policy optimisation: each response against others to its prompt"
    trainer: ClassVar[str] = "nemorl_grpo.trainer:GRPOTrainer"

    algorithm: Literal["grpo"] = "grpo"
    """Name of the algorithm."""
    loss: LossFlavour | None = None
    """The loss as another system computes it: ``trl``, ``verl``, ``openrlhf`` or ``nemo_rl``. Fills in the clip range,
    the aggregation and the KL; ``kl_penalty`` may be given beside it."""

    @model_validator(mode="before")
    @classmethod
    def _fill_loss(cls, data: Any) -> Any:
        return filled(data, "loss", LOSSES)

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.loss is not None:
            name = self.loss.flavour
            yield from contradictions(self, "loss", LOSSES[name], name)
