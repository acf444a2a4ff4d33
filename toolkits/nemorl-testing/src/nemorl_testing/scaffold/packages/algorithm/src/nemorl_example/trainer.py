"""What rewards are worth, and which loss is made of that. The step comes from ``PolicyGradientTrainer``."""

from __future__ import annotations

from nemorl.types import Samples
from nemorl_rl.policy_gradient.advantages import group_advantages
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer

from nemorl_example.config import ExampleConfig
from nemorl_example.loss import ExampleLoss


class ExampleTrainer(PolicyGradientTrainer[ExampleConfig]):
    """REINFORCE against the mean reward of the responses to the same prompt."""

    config_class = ExampleConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        # What a response earned beyond the mean of all responses to its prompt.
        return group_advantages(samples.rewards, samples.group_ids, normalize_std=False, leave_one_out=False)

    def build_loss(self) -> ExampleLoss:
        return ExampleLoss(**self.loss_options)
