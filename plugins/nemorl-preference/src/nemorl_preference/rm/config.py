"""The knobs of training a reward model and of scoring with one. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from nemorl.config import RESUMABLE, Config, ModelName
from nemorl.contracts import Head
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import EnvironmentConfig
from pydantic import Field

from nemorl_preference.pair_config import PairConfig, pair_metrics

if TYPE_CHECKING:
    from nemorl.contracts.environment import Environment


class RMConfig(PairConfig):
    """A reward model from pairs of responses (Bradley-Terry, arXiv:2203.02155)."""

    summary: ClassVar[str] = "Reward model from pairs of responses (Bradley-Terry)"
    trainer: ClassVar[str] = "nemorl_preference.rm.trainer:RMTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = pair_metrics(
        {
            "center_loss": MetricInfo(
                "Center loss", "squared reward", "mean square of the sum of a pair's rewards", smooth=True
            )
        },
        "mean reward of the {side} responses",
        "both drifting from 0 together: set `center_loss_weight`",
    )
    policy_head: ClassVar[Head] = "value"

    algorithm: Literal["rm"] = "rm"
    """Name of the algorithm."""
    margin_column: str | None = None
    """Column with how much better the chosen response is, in units of reward; rows without it count as 0. Unset: any
    difference will do."""
    center_loss_weight: float = Field(0.0, ge=0)
    """Weight of a term that keeps the rewards of a pair around 0 (arXiv:2312.09244; 0.01 is typical). Pairs alone leave
    the zero of the scale undetermined, which matters where rewards of different prompts meet."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.policy.lora is not None:
            yield ConfigIssue(
                "policy.lora", "a reward model is trained whole: its head is new", "remove lora from the policy"
            )


class RewardNormalization(Config):
    """From the reward model's scale to the reward: clamp((score - mean) / std)."""

    mean: float = 0.0
    """Subtracted. The mean score of typical responses, e.g. ``validation/rewards_chosen_mean`` of the model's run."""
    std: float = Field(1.0, gt=0)
    """Divides what is left: the spread of typical scores."""
    clip: float | None = Field(None, gt=0)
    """Rewards are kept within -clip … clip, so that one response which fools the model cannot rule a group."""


class RewardModelConfig(EnvironmentConfig):
    """Rewards from a Hugging Face sequence classifier with one label."""

    summary: ClassVar[str] = "scores responses with a reward model (any sequence classifier with one label)"
    requires_modules: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    install_hint: ClassVar[str] = "pip install nemorl-preference"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/reward_model_score": MetricInfo(
            "Score of the reward model", meaning="its own number, before `normalization`", smooth=True
        ),
    }

    model: ModelName = Field(min_length=1)
    """Hugging Face name or folder of the reward model, e.g. ``model/`` of a run of ``rm``."""
    text: Literal["auto", "chat", "plain", "pair"] = "auto"
    """How prompt and response become one text. ``chat``: through the model's chat template, a text prompt as the user's
    message. ``plain``: one after the other. ``pair``: as the two texts of the tokenizer, for encoders such as DeBERTa.
    ``auto``: chat messages as ``chat``, text as ``plain``, which is how ``rm`` trains."""
    device: Annotated[str, RESUMABLE] = "auto"
    """Where the model computes: ``cpu``, ``cuda:1``, …. ``auto``: the first CUDA device if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the model."""
    max_tokens: int = Field(4096, ge=2)
    """Longer texts are cut at the end."""
    batch_tokens: Annotated[int, RESUMABLE] = Field(16384, ge=1)
    """Padded tokens per forward pass. 1 scores every text alone: slower, but the last bits of a score then do not
    depend on what else is scored."""
    normalization: RewardNormalization | None = None
    """Bring the scores to another scale. Unset: the reward is the model's own number."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        is_path = self.model.startswith(("/", "./", "../", "~")) or self.model.count("/") > 1
        if is_path and not (Path(self.model).expanduser() / "config.json").is_file():
            yield ConfigIssue(
                "model", f"{self.model!r} is not a model folder: it has no config.json", "give a Hugging Face folder"
            )

    def build(self) -> Environment:
        from nemorl_preference.rm.environment import RewardModel

        return RewardModel(self)
