"""Configs of backends whose ``mistake`` names the class that ``build`` makes: of ``training`` or ``generation*``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemorl_dtensor import DTensorConfig, HFGenerationConfig
from nemorl_dtensor.describing import DTensorPlan
from nemorl_rl.planning.memory.describing import TrainingPlan
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import Moments


class BrokenTraining(DTensorConfig):
    """A training backend with a mistake."""

    mistake: str = "DTensorBackend"
    """Class name."""

    def build(self, policy: Any, worker: Any, *, reference: bool, head: Any = "language_model") -> Any:
        from broken import training

        if self.mistake == "NeverClips":
            policy = policy.model_copy(update={"max_grad_norm": 1e9})
        return getattr(training, self.mistake)(policy, worker, self, reference=reference, head=head)

    def training_plan(self) -> TrainingPlan:
        return ShrinkingPlan(self) if self.mistake == "PlansLongMicrobatchesAsShort" else super().training_plan()


class ShrinkingPlan(DTensorPlan):
    """Takes less memory for more tokens."""

    def memory(self, model: HeldModel) -> Moments:
        return super().memory(replace(model, microbatch_tokens=1_000_000 // model.microbatch_tokens))


class BrokenGeneration(HFGenerationConfig):
    """A generation backend with a mistake."""

    mistake: str = "HFGeneration"
    """Class name."""

    def build(self, generation: Any, policy: Any, worker: Any, weights: Any) -> Any:
        from broken import generation as of_requests
        from broken import generation_weights as of_weights

        engine = getattr(of_requests, self.mistake, None) or getattr(of_weights, self.mistake)
        return engine(generation, policy, worker, weights, self)
