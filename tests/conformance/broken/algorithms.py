"""Algorithms with a mistake each: supervised fine-tuning, as it is fast, and GRPO where responses are sampled."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from nemorl_distillation import OPDConfig
from nemorl_grpo import GRPOConfig
from nemorl_ppo import PPOConfig
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


class RoundsToFloat32(SoundSFT):
    """Rounds log-probs in its loss to float32, whatever it is given: no run shows it."""

    trainer: ClassVar[str] = "broken.trainers:RoundsToFloat32Trainer"


class SoundGRPO(GRPOConfig):
    """Nothing is wrong with it either."""

    trainer: ClassVar[str] = "broken.trainers:SoundGRPOTrainer"
    algorithm: Literal["broken"] = "broken"  # type: ignore[assignment]
    """Name of the algorithm."""


class SpillsMaskedSlots(SoundGRPO):
    """Multiplies by the mask, and NaN times zero is NaN."""

    trainer: ClassVar[str] = "broken.trainers:SpillingTrainer"


class SyncsTooLate(SoundGRPO):
    """Publishes the weights of a step when the next one begins: what looks at the run in between sees older ones."""

    trainer: ClassVar[str] = "broken.trainers:SyncsTooLateTrainer"


class WantsTheWorst(SoundGRPO):
    """Its advantages have the other sign."""

    trainer: ClassVar[str] = "broken.trainers:WantsTheWorstTrainer"


class ClimbsTheLoss(SoundGRPO):
    """Its loss has the other sign."""

    trainer: ClassVar[str] = "broken.trainers:ClimbsTheLossTrainer"


class Unlearns(SoundSFT):
    """Makes the responses less likely."""

    trainer: ClassVar[str] = "broken.trainers:UnlearningTrainer"


class RollsItsMask(SoundGRPO):
    """Its batches train on the token after each of those that were sampled."""

    trainer: ClassVar[str] = "broken.trainers:RollsItsMaskTrainer"


class LosesTheEnd(SoundSFT):
    """Trains on responses but for their last token."""

    trainer: ClassVar[str] = "broken.trainers:LosesTheEndTrainer"


class RollsTheMaskOfItsLoss(SoundGRPO):
    """Sees the mask one token too late in its loss."""

    trainer: ClassVar[str] = "broken.trainers:RollsTheMaskOfItsLossTrainer"


class AveragesAverages(SoundSFT):
    """Of a metric."""

    trainer: ClassVar[str] = "broken.trainers:AveragesAveragesTrainer"


class SoundPPO(PPOConfig):
    """Nothing is wrong with it."""

    trainer: ClassVar[str] = "broken.trainers:SoundPPOTrainer"
    algorithm: Literal["broken"] = "broken"  # type: ignore[assignment]
    """Name of the algorithm."""


class CriticFlees(SoundPPO):
    """Its critic's loss has the other sign."""

    trainer: ClassVar[str] = "broken.trainers:CriticFleesTrainer"


class CriticAverages(SoundPPO):
    """Its critic averages over the tokens that it is shown."""

    trainer: ClassVar[str] = "broken.trainers:CriticAveragesTrainer"


class CriticRollsItsMask(SoundPPO):
    """Its critic sees the mask one token too late in its loss."""

    trainer: ClassVar[str] = "broken.trainers:CriticRollsItsMaskTrainer"


class CriticTimesMask(SoundPPO):
    """Its critic multiplies by the mask."""

    trainer: ClassVar[str] = "broken.trainers:CriticTimesMaskTrainer"


class SoundStudent(OPDConfig):
    """Nothing is wrong with it."""

    trainer: ClassVar[str] = "broken.trainers:SoundStudentTrainer"
    algorithm: Literal["broken"] = "broken"  # type: ignore[assignment]
    """Name of the algorithm."""


class Disagrees(SoundStudent):
    """Its loss has the other sign."""

    trainer: ClassVar[str] = "broken.trainers:DisagreesTrainer"
