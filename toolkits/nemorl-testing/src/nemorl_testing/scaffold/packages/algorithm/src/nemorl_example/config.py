"""The knobs. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from nemorl_rl.policy_gradient.config import PolicyGradientConfig
from pydantic import Field


class ExampleConfig(PolicyGradientConfig):
    """REINFORCE (Williams, 1992) against the mean reward of the responses to the same prompt."""

    summary: ClassVar[str] = "REINFORCE against the mean reward of each prompt"
    trainer: ClassVar[str] = "nemorl_example.trainer:ExampleTrainer"

    algorithm: Literal["example"] = "example"
    """Name of the algorithm."""
    num_prompts_per_step: int = Field(16, ge=1)
    """Prompts in a batch."""
    num_generations_per_prompt: int = Field(8, ge=2)
    """Responses sampled to each prompt; their mean reward is the baseline."""
