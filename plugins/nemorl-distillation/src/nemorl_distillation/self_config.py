"""The knobs of distillation from oneself: the teacher is the policy, told more. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.config.models import AuxiliaryModel
from nemorl.errors import ConfigIssue, DataError, boundary
from nemorl.metrics import MetricInfo
from nemorl_rl.declared_metrics import RATIO_METRICS, SAMPLER_METRICS
from pydantic import Field

from nemorl_distillation.config import KLType, TaughtConfig, TopKDivergence
from nemorl_distillation.contexts import given_text, placeholders
from nemorl_distillation.declared_metrics import SELF_METRICS

if TYPE_CHECKING:
    from nemorl_distillation.loss import TopKDistillationLoss
    from nemorl_distillation.reverse_kl import SampledReverseKLLoss

INITIAL = "teacher"
"""Role of the model that keeps the initial weights, where the policy's workers do not."""


class SelfTaughtConfig(TopKDivergence, TaughtConfig):
    """Options of every algorithm whose teacher is the policy itself, behind a privileged prompt."""

    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **TaughtConfig.metrics,
        **SELF_METRICS,
        **RATIO_METRICS,
        **SAMPLER_METRICS,
    }
    tells: ClassVar[frozenset[str]] = frozenset()
    """Names, beside ``prompt``, of what ``teacher_prompt`` may hold."""

    num_prompts_per_step: int = Field(32, ge=1)
    """Prompts in a batch."""
    teacher_weights: Literal["current", "initial"] = "initial"
    """``initial``: the teacher is the policy as it was before training, which cannot drift, nor get better.
    ``current``: as it is at the beginning of the step; it may come to agree with whatever the policy says."""
    compare: Literal["topk", "sampled"] = "topk"
    """``topk``: the teacher's likeliest tokens at each place, by ``kl_type``. ``sampled``: the sampled token alone, by
    policy gradient of the reverse KL; for training backends without ``topk_logprobs``."""
    teacher_prompt: str = "{prompt}"
    """What the teacher reads in place of the prompt, or of its last user message, which is ``{prompt}``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from self._prompt_problems()
        if self.compare == "topk" and "topk_logprobs" not in self.policy.backend.supports:
            what = "policy.backend does not support topk_logprobs, which this run needs"
            yield ConfigIssue("compare", what, "set compare: sampled, or choose another training backend")
        if self.compare == "sampled":
            if self.generation.temperature == 0:
                what = "the reverse KL is estimated from sampled tokens, greedy ones are not samples"
                yield ConfigIssue("generation.temperature", what, "use 1.0, or compare: topk")
            for name in TopKDivergence.model_fields:
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield ConfigIssue(name, "has no effect with compare: sampled", "leave it out, or compare: topk")

    def _prompt_problems(self) -> Iterator[ConfigIssue]:
        named = set(placeholders(self.teacher_prompt))
        known = {"prompt", *self.tells}
        if named - known:
            what = f"unknown placeholder {', '.join(sorted(named - known))}"
            yield ConfigIssue("teacher_prompt", what, f"known are {', '.join(sorted(known))}")
        elif not named & self.tells:
            what = "the teacher would read no more than the student"
            yield ConfigIssue("teacher_prompt", what, f"write {' or '.join(f'{{{n}}}' for n in sorted(self.tells))}")

    @property
    def needs_reference(self) -> bool:
        return self.teacher_weights == "initial" and self.compare == "sampled"

    @property
    def auxiliary_models(self) -> Mapping[str, AuxiliaryModel]:
        if self.teacher_weights == "current" or self.needs_reference:
            return super().auxiliary_models
        return {**super().auxiliary_models, INITIAL: AuxiliaryModel(self.policy.model_copy(update={"lora": None}))}

    def build_loss(self) -> TopKDistillationLoss | SampledReverseKLLoss:
        """The loss of what is compared."""
        from nemorl_distillation.loss import TopKDistillationLoss
        from nemorl_distillation.reverse_kl import SampledReverseKLLoss

        if self.compare == "sampled":
            return SampledReverseKLLoss(on_policy=self.num_minibatches == 1)
        return TopKDistillationLoss(self.kl_type, self.mixed_kl_weight, self.outside_topk, jsd_beta=self.jsd_beta)


class ColumnContextConfig(SelfTaughtConfig):
    """Options where the privileged text is in the data."""

    context_column: str = Field("solution", min_length=1)
    """Column of the data that the teacher reads and the student does not. Where a row has ``messages`` in its place,
    what the assistant says last in them."""

    def launch_problems(self) -> Iterator[ConfigIssue]:
        found = list(super().launch_problems())
        yield from found
        if self.data is None or any(problem.path == "data" for problem in found):
            return
        with boundary(f"dataset {type(self.data).__name__}"):
            row = self.data.first_row()
        try:
            _ = row is None or given_text(row, self.context_column)
        except DataError as error:
            yield ConfigIssue("context_column", error.message, error.fix)


class OPSDConfig(ColumnContextConfig):
    """On-policy self-distillation (arXiv:2601.18734)."""

    summary: ClassVar[str] = "Self-distillation: the policy's own judgement of its responses once it knows the solution"
    trainer: ClassVar[str] = "nemorl_distillation.opsd:OPSDTrainer"
    tells: ClassVar[frozenset[str]] = frozenset({"solution"})

    algorithm: Literal["opsd"] = "opsd"
    """Name of the algorithm."""
    kl_type: KLType = "forward"
    """``forward``, KL(teacher || student): cover all that the teacher would say. ``reverse``, KL(student || teacher):
    say nothing that it would not. ``mixed``: both, weighted by ``mixed_kl_weight``. ``jsd``: the generalised
    Jensen-Shannon divergence, between the two and bounded, so that no single token dominates."""
    teacher_prompt: str = (
        "{prompt}\n\nA correct solution of this problem:\n{solution}\n\n"
        "With it in mind, solve the problem in your own way."
    )
    """What the teacher reads in place of the prompt, or of its last user message, which is ``{prompt}``.
    ``{solution}`` is the text of ``context_column``."""


class SDFTConfig(ColumnContextConfig):
    """Self-distillation fine-tuning on demonstrations (arXiv:2601.19897)."""

    summary: ClassVar[str] = "Self-distillation: learn from demonstrations on responses of one's own"
    trainer: ClassVar[str] = "nemorl_distillation.sdft:SDFTTrainer"
    tells: ClassVar[frozenset[str]] = frozenset({"demonstration"})

    algorithm: Literal["sdft"] = "sdft"
    """Name of the algorithm."""
    kl_type: KLType = "reverse"
    """``forward``, KL(teacher || student): cover all that the teacher would say. ``reverse``, KL(student || teacher):
    say nothing that it would not. ``mixed``: both, weighted by ``mixed_kl_weight``. ``jsd``: the generalised
    Jensen-Shannon divergence, between the two and bounded, so that no single token dominates."""
    context_column: str = Field("response", min_length=1)
    """Column of the data that the teacher reads and the student does not. Where a row has ``messages`` in its place,
    what the assistant says last in them."""
    teacher_prompt: str = (
        "{prompt}\n\nFor example, somebody responded like this:\n{demonstration}\n\nNow give a response of your own."
    )
    """What the teacher reads in place of the prompt, or of its last user message, which is ``{prompt}``.
    ``{demonstration}`` is the text of ``context_column``."""


class SDPOConfig(SelfTaughtConfig):
    """Self-distillation policy optimisation (arXiv:2601.20802)."""

    summary: ClassVar[str] = (
        "Self-distillation: the policy's own judgement after feedback, or a response that succeeded"
    )
    trainer: ClassVar[str] = "nemorl_distillation.sdpo:SDPOTrainer"
    best_metric: ClassVar[str] = "validation/accuracy"
    best_is_highest: ClassVar[bool] = True
    tells: ClassVar[frozenset[str]] = frozenset({"demonstration", "feedback"})

    algorithm: Literal["sdpo"] = "sdpo"
    """Name of the algorithm."""
    num_generations_per_prompt: int = Field(8, ge=1)
    """Responses per prompt. The first that succeeds is shown to the teacher of the others."""
    topk: int = Field(100, ge=1)
    """Likeliest tokens of the teacher that are compared, at each place. Raise it while ``teacher_topk_mass`` is well
    below 1; memory and traffic grow with it."""
    kl_type: KLType = "jsd"
    """``forward``, KL(teacher || student): cover all that the teacher would say. ``reverse``, KL(student || teacher):
    say nothing that it would not. ``mixed``: both, weighted by ``mixed_kl_weight``. ``jsd``: the generalised
    Jensen-Shannon divergence, between the two and bounded, so that no single token dominates."""
    success_reward: float = 1.0
    """Least reward of a response that others may be shown."""
    teacher_prompt: str = "{prompt}{demonstration}{feedback}\n\nNow solve the task."
    """What the teacher reads in place of the prompt, or of its last user message, which is ``{prompt}``. Where a
    response has no demonstration, or no feedback, that part is empty."""
    demonstration_text: str = "\n\nAn attempt that succeeded:\n{demonstration}"
    """How another response to the prompt, which succeeded, stands in ``teacher_prompt``."""
    feedback_text: str = "\n\nWhat came of your last attempt:\n{feedback}"
    """How the environment's words on the response (``Score.feedback``) stand in ``teacher_prompt``."""

    def reward_problems(self, scorer: object, fix: str) -> Iterator[ConfigIssue]:
        """Without an environment nothing succeeds."""
        if scorer is None:
            yield ConfigIssue("environment", "nothing scores the responses", fix)

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        for name in sorted(self.tells):
            if placeholders(getattr(self, f"{name}_text")) != [name]:
                yield ConfigIssue(f"{name}_text", f"{{{name}}} stands in it once", f"write {{{name}}} where it belongs")
