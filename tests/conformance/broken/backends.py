"""Configs of backends whose ``mistake`` names the class that ``build`` makes: of ``training`` or ``generation``."""

from __future__ import annotations

from typing import Any

from nemorl_dtensor import DTensorConfig, HFGenerationConfig


class BrokenTraining(DTensorConfig):
    """A training backend with a mistake."""

    mistake: str = "DTensorBackend"
    """Class name."""

    def build(self, policy: Any, worker: Any, *, reference: bool, head: Any = "language_model") -> Any:
        from broken import training

        if self.mistake == "NeverClips":
            policy = policy.model_copy(update={"max_grad_norm": 1e9})
        return getattr(training, self.mistake)(policy, worker, self, reference=reference, head=head)


class BrokenGeneration(HFGenerationConfig):
    """A generation backend with a mistake."""

    mistake: str = "HFGeneration"
    """Class name."""

    def build(self, generation: Any, policy: Any, worker: Any, weights: Any) -> Any:
        from broken import generation as engines

        return getattr(engines, self.mistake)(generation, policy, worker, weights, self)
