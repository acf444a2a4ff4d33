"""Options of a draft that is kept fresh, and the model that a run then has beside its policy.

An engine guesses tokens ahead with a small model, the draft, and the policy's model checks them (arXiv:2211.17192). A
guess is accepted the more often the closer the draft's distribution is to the policy's, which moves away from it update
by update. What the policy sampled is an exact sample of that distribution, and each step has it anyway: ``training``.
Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from nemorl.config.base import RESUMABLE, Config
from nemorl.config.models import (
    AuxiliaryModel,
    MediaConfig,
    OptimizerConfig,
    PolicyConfig,
    ScheduleConfig,
    TokenizerConfig,
)
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import GenerationBackendConfig
from pydantic import Field

from nemorl_rl.placement.tenants import DRAFT

OPTION = "speculative.keep_fresh"
"""Where engines have the options of this module."""

DRAFT_METRICS: Mapping[str, MetricInfo] = {
    "train/draft_loss": MetricInfo(
        "Distance of the draft",
        "nats",
        "`keep_fresh`: KL from the policy's distribution to the draft's, estimated at the tokens that the draft learns "
        "from, before each of its updates; about 0 where they are the same",
        "growth: the policy moves faster than the draft follows; raise `lr` or `updates`, or lower `every`",
        smooth=True,
    ),
    "timing/train/draft_training": MetricInfo("Draft training", "seconds", "`keep_fresh`: the draft's training"),
}


class KeepFresh(Config):
    """How the draft learns from what the policy samples.

    Example:
        >>> KeepFresh(every=2).trains_at(3)
        False
    """

    lr: float = Field(1e-5, gt=0, le=1)
    """Learning rate of AdamW; larger than the policy's, which the draft has to follow."""
    every: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """It learns in every so many steps. Raise it where the policy moves slowly."""
    updates: Annotated[int, RESUMABLE] = Field(1, ge=1, le=1000)
    """Optimizer steps on the responses of such a step, each on its share of them."""
    max_tokens: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Tokens of prompts and responses, about, that it learns from in such a step. Unset: all."""

    def trains_at(self, step: int) -> bool:
        return step % self.every == 0


@dataclass(frozen=True)
class FreshDraft:
    """A draft that a run trains."""

    model_name: str
    settings: KeepFresh

    def beside(self, policy: PolicyConfig) -> AuxiliaryModel:
        """Its model on the policy's kind of training backend: small enough for one device, all weights trained."""
        own = {
            "model_name": self.model_name,
            "init": "pretrained",
            "hf_config_overrides": {},
            "tokenizer": TokenizerConfig(),
            "media": MediaConfig(),
            "backend": type(policy.backend)(),
            "tensor_parallel_size": 1,
            "optimizer": OptimizerConfig(lr=self.settings.lr),
            "schedule": ScheduleConfig(),
            "max_grad_norm": 1.0,
            "lora": None,
        }
        return AuxiliaryModel(policy.model_copy(update=own), learns=True)


class GuessesAhead:
    """Mixin for configs of generation backends whose guesses may come from a model that the run trains."""

    @property
    def fresh_draft(self) -> FreshDraft | None:
        """The model; ``None``: no weights guess, or they stay as they are."""
        raise NotImplementedError(f"{type(self).__name__} must define fresh_draft")


def fresh_draft(backend: GenerationBackendConfig) -> FreshDraft | None:
    """The draft that a run with this generation backend trains, if it has one.

    Example:
        >>> fresh_draft(GenerationBackendConfig()) is None
        True
    """
    return backend.fresh_draft if isinstance(backend, GuessesAhead) else None


def draft_models(backend: GenerationBackendConfig, policy: PolicyConfig) -> Mapping[str, AuxiliaryModel]:
    """It by its role, among the models of a run."""
    found = fresh_draft(backend)
    return {} if found is None else {DRAFT: found.beside(policy)}


def draft_hooks(backend: GenerationBackendConfig) -> Mapping[str, object]:
    """The hook object that trains it, by name. Importing that imports torch."""
    found = fresh_draft(backend)
    if found is None:
        return {}
    from nemorl_rl.drafts.training import DraftTrainer

    return {"nemorl-rl:draft": DraftTrainer(found.settings)}


def is_out_of_reach(backend: GenerationBackendConfig) -> bool:
    """A draft is asked for, of an engine whose config class lives in another environment: what stands here in its
    place has the options as they were given, and none of its properties."""
    section, _, name = OPTION.partition(".")
    options = dict(backend).get(section)
    return isinstance(options, Mapping) and options.get(name) is not None
