"""SDPO: the teacher is the initial policy once it knows what came of its response (arXiv:2601.20802).

It is shown the first response to the same prompt that succeeded, other than the one it reads, and what the environment
had to say of that one (``Score.feedback``). A response with neither trains nothing, as one without a verdict.
Differs from the paper: the teacher has the initial weights, or those of now, where the paper's are a moving average;
it chooses the likeliest tokens that are told apart, in the paper the student does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from nemorl.types import Sample, Samples

from nemorl_distillation.contexts import filled
from nemorl_distillation.self_config import SDPOConfig
from nemorl_distillation.self_trainer import SelfTaughtTrainer


class SDPOTrainer(SelfTaughtTrainer[SDPOConfig]):
    """Self-distillation policy optimisation (arXiv:2601.20802)."""

    config_class = SDPOConfig
    compares_held_out = False  # a single response has no other to be shown

    def contexts(self, samples: Samples) -> list[Mapping[str, str] | None]:
        succeeded: dict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.score.valid and sample.reward >= self.config.success_reward:
                succeeded[sample.prompt.index].append(sample)
        return [self._context(sample, succeeded[sample.prompt.index]) for sample in samples]

    def _context(self, sample: Sample, succeeded: list[Sample]) -> Mapping[str, str] | None:
        shown = next((other for other in succeeded if other is not sample), None)
        if not sample.score.valid or (shown is None and not sample.score.feedback):
            return None
        found = {"demonstration": shown.response if shown is not None else "", "feedback": sample.score.feedback}
        texts = {"demonstration": self.config.demonstration_text, "feedback": self.config.feedback_text}
        return {name: filled(texts[name], {name: text}) if text else "" for name, text in found.items()}
