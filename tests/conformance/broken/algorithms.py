"""Algorithms with a mistake each: supervised fine-tuning, as it is fast, and GRPO where responses are sampled."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from nemorl_grpo import GRPOConfig
from nemorl_sft import SFTConfig


class SoundSFT(SFTConfig):
    """Nothing is wrong with it."""

    trainer: ClassVar[str] = "broken.trainers:SoundTrainer"
    algorithm: Literal["broken"] = "broken"  # type: ignore[assignment]
    """Name of the algorithm."""


class BorrowedTrainer(SoundSFT):
    """Its trainer is another algorithm's, and ``from_pretrained`` would build that one's config."""

    trainer: ClassVar[str] = "nemorl_sft.trainer:SFTTrainer"


class OtherName(SFTConfig):
    """Its ``algorithm`` is not the name it is installed under."""

    trainer: ClassVar[str] = "broken.trainers:OtherNameTrainer"


class Diverges(SoundSFT):
    """Reports a number that is none."""

    trainer: ClassVar[str] = "broken.trainers:DivergingTrainer"


class OnlyLooks(SoundSFT):
    """Computes the loss and leaves the weights alone."""

    trainer: ClassVar[str] = "broken.trainers:LookingTrainer"


class Forgetful(SoundSFT):
    """Keeps state that no checkpoint holds."""

    trainer: ClassVar[str] = "broken.trainers:ForgetfulTrainer"


class FixedSeed(SoundSFT):
    """Always draws the same."""

    trainer: ClassVar[str] = "broken.trainers:FixedSeedTrainer"

    def build(self) -> Any:
        return SoundSFT.build(self.model_copy(update={"seed": 1}))


class OwnNormalisation(SoundSFT):
    """Averages over the tokens that it is shown, instead of weighing them by ``loss_weights``."""

    trainer: ClassVar[str] = "broken.trainers:OwnNormalisationTrainer"


class SoundGRPO(GRPOConfig):
    """Nothing is wrong with it either."""

    trainer: ClassVar[str] = "broken.trainers:SoundGRPOTrainer"
    algorithm: Literal["broken"] = "broken"  # type: ignore[assignment]
    """Name of the algorithm."""


class SpillsMaskedSlots(SoundGRPO):
    """Multiplies by the mask, and NaN times zero is NaN."""

    trainer: ClassVar[str] = "broken.trainers:SpillingTrainer"


class SyncsNowAndThen(SoundGRPO):
    """Samples from an older policy every other step."""

    trainer: ClassVar[str] = "broken.trainers:SyncsNowAndThenTrainer"
