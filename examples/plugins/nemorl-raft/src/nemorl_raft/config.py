"""The knobs. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from nemorl_rl.config import RolloutRunConfig
from pydantic import Field


class RaftConfig(RolloutRunConfig):
    """Reward-ranked fine-tuning (arXiv:2304.06767): imitate the best of several responses to each prompt."""

    summary: ClassVar[str] = "Imitate the best of your own responses"
    trainer: ClassVar[str] = "nemorl_raft.trainer:RaftTrainer"

    algorithm: Literal["raft"] = "raft"
    """Name of the algorithm."""
    num_prompts_per_step: int = Field(16, ge=1)
    """Prompts in a batch."""
    num_generations_per_prompt: int = Field(8, ge=2)
    """Responses sampled to each prompt (K in the paper); one of them is imitated."""
    min_reward: float | None = None
    """The best response is imitated only if it earned this much. Set it to 1 where rewards are 0 or 1: the best of
    eight wrong answers is wrong. Unset: always, as in the paper."""
