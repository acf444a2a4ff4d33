"""The knobs of distillation from other models, in blocks, then each algorithm's own. Importing this imports no torch.

    TaughtConfig      responses per step, updates, aggregation      every algorithm whose only signal is a teacher
    TeacherModels     ``teacher``, ``teachers``, ``teacher_column``  a block: the teachers are models of their own
    TopKDivergence    what is compared at each token                 a block

Blocks stand before the other base. Teachers that are the policy itself are in ``self_config``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from nemorl.config import RESUMABLE, Config, ModelName, PolicyConfig
from nemorl.config.models import (
    TRAINING_BACKEND,
    AuxiliaryModel,
    TokenizerConfig,
    interpreter_problems,
    model_problems,
)
from nemorl.errors import ConfigIssue, boundary
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.declared_metrics import RATIO_METRICS, SAMPLER_METRICS
from pydantic import Field

from nemorl_distillation.declared_metrics import DISTILLATION_METRICS

KLType = Literal["forward", "reverse", "mixed", "jsd"]
OutsideTopK = Literal["tail", "renormalize", "zero"]


class TeacherConfig(Config):
    """The model to imitate: it never learns and never speaks, it reads what the student wrote."""

    model: ModelName = Field(min_length=1)
    """Hugging Face name or local folder, of any size and architecture."""
    align: Literal["ids", "text"] = "ids"
    """How its tokens meet the student's. ``ids``: it has the student's tokenizer. ``text``: it has another; it reads
    the same text in its own tokens and with its own chat template, and is compared where a token of each begins."""
    weight: float = Field(1.0, gt=0)
    """Factor of its part of the loss. Parts of several teachers are added up, so that two of weight 0.5 are their
    mean."""
    backend: Annotated[TrainingBackendConfig, TRAINING_BACKEND] = Field(
        default="dtensor",
        validate_default=True,  # type: ignore[assignment]
    )
    """Training backend that computes its log-probs: a name, or a mapping with ``name`` and the backend's options."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of its weights and compute; log-probs are float32 always. The teacher is not updated, so bfloat16 costs
    little. Use float32 on CPUs without bfloat16 units."""
    tensor_parallel_size: Annotated[int, RESUMABLE] = Field(1, ge=1)
    """Ranks that share each layer. Raise it when one device cannot hold the teacher beside the student."""
    microbatch_tokens: Annotated[int | None, RESUMABLE] = Field(None, ge=1)
    """Padded tokens per forward pass. Unset: the backend's choice for the device. It does not change results."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from model_problems("model", self.model)

    def beside(self, student: PolicyConfig) -> PolicyConfig:
        """This model on the workers of ``student``: what is not said here is as there."""
        own = {name: getattr(self, name) for name in ("backend", "precision", "tensor_parallel_size")}
        own |= {"model_name": self.model, "microbatch_tokens": self.microbatch_tokens, "tokenizer": TokenizerConfig()}
        return student.model_copy(update={**own, "init": "pretrained", "lora": None, "hf_config_overrides": {}})


class TaughtConfig(RolloutRunConfig):
    """Options of every algorithm whose student samples responses and learns from what a teacher says of them."""

    needs_columns: ClassVar[tuple[frozenset[str], ...]] = (frozenset({"prompt"}), frozenset({"messages"}))
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **RolloutRunConfig.metrics,
        **DISTILLATION_METRICS,
    }
    best_metric: ClassVar[str] = "validation/reverse_kl"
    best_is_highest: ClassVar[bool] = False

    num_prompts_per_step: int = Field(128, ge=1)
    """Prompts in a batch."""
    num_generations_per_prompt: int = Field(1, ge=1)
    """Responses of the student per prompt. Responses are not compared with each other, so more prompts teach more."""
    max_turns: int = Field(1, ge=1)
    """Responses per episode at most, where an environment answers back."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch. Above 1 the later ones see responses of a slightly older student."""
    loss_aggregation: Literal["token", "sequence"] = "token"
    """Average over all response tokens, or over responses of their own averages."""

    def reward_problems(self, scorer: object, fix: str) -> Iterator[ConfigIssue]:
        yield from ()  # the teacher is all it learns from; an environment that is given counts for validation

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        responses = self.num_prompts_per_step * self.num_generations_per_prompt
        if self.num_minibatches > responses:
            yield ConfigIssue(
                "num_minibatches", f"{self.num_minibatches} minibatches of {responses} responses", "lower it"
            )


class TeacherModels(RolloutRunConfig):
    """A block of knobs: the models that teach, one or several by name."""

    teacher: TeacherConfig | None = None
    """The model to imitate: ``{model: …}``."""
    teachers: dict[Annotated[str, Field(pattern=r"^[\w-]+$")], TeacherConfig] = Field({})
    """Several models to imitate in place of ``teacher``, each under a name. Those that differ in name and weight alone
    are loaded once."""
    teacher_column: str | None = None
    """Column of the data that names the one of ``teachers`` who reads a row's responses, e.g. ``task``. Unset: all of
    them read all responses."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.teacher is None and not self.teachers:
            yield ConfigIssue("teacher", "there is no teacher", "set teacher: {model: …}, or several under teachers")
        if self.teacher is not None and self.teachers:
            yield ConfigIssue("teacher", "teachers are set as well", "move it to them, or remove one of the keys")
        if self.teacher_column is not None and not self.teachers:
            yield ConfigIssue("teacher_column", "there are no teachers to choose from", "set teachers, or remove it")
        for path, teacher in self.teachers_by_path.items():
            if teacher.align == "text":
                yield from self._align_problems(f"{path}.align")
            for problem in interpreter_problems("training_backends", teacher.backend, self.policy.python):
                if problem.path == "backend":  # a wrong interpreter is reported for the policy
                    yield replace(problem, path=f"{path}.backend")

    def _align_problems(self, path: str) -> Iterator[ConfigIssue]:
        """Problems of a teacher with another tokenizer, which most algorithms have no use for."""
        yield ConfigIssue(
            path,
            f"{self.algorithm} asks a teacher for the log-probs of the student's own tokens",
            "use algorithm: distillation, or a teacher with the student's tokenizer",
        )

    def launch_problems(self) -> Iterator[ConfigIssue]:
        found = list(super().launch_problems())
        yield from found
        if self.teacher_column is None or self.data is None or any(problem.path == "data" for problem in found):
            return
        with boundary(f"dataset {type(self.data).__name__}"):
            row = self.data.first_row()
        if row is not None and row.get(self.teacher_column) not in self.teachers:
            yield ConfigIssue(
                "teacher_column",
                f"the first row's {self.teacher_column!r} is {row.get(self.teacher_column)!r}, the teachers are "
                f"{', '.join(self.teachers)}",
                "name one of the teachers in every row, or leave teacher_column out",
            )

    @property
    def teachers_by_path(self) -> Mapping[str, TeacherConfig]:
        """All teachers by where the config has them: ``teacher``, or ``teachers.NAME``."""
        one = {} if self.teacher is None else {"teacher": self.teacher}
        return one or {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}

    def role_of(self, teacher: TeacherConfig) -> str:
        """The path of the first teacher that is the same model on the same backend: it is loaded for all of them."""
        model = teacher.beside(self.policy)
        return next(path for path, known in self.teachers_by_path.items() if known.beside(self.policy) == model)

    @property
    def auxiliary_models(self) -> Mapping[str, AuxiliaryModel]:
        teachers = self.teachers_by_path.values()
        own = {self.role_of(teacher): AuxiliaryModel(teacher.beside(self.policy)) for teacher in teachers}
        return {**super().auxiliary_models, **own}


class TopKDivergence(Config):
    """A block of knobs: the divergence over a teacher's likeliest tokens."""

    topk: int = Field(64, ge=1)
    """Likeliest tokens of the teacher that are compared, at each place. Raise it while ``teacher_topk_mass`` is well
    below 1; memory and traffic grow with it."""
    kl_type: KLType = "mixed"
    """``forward``, KL(teacher || student): cover all that the teacher would say. ``reverse``, KL(student || teacher):
    say nothing that it would not. ``mixed``: both, weighted by ``mixed_kl_weight``. ``jsd``: the generalised
    Jensen-Shannon divergence, between the two and bounded, so that no single token dominates."""
    mixed_kl_weight: float = Field(0.5, ge=0, le=1)
    """Weight of the forward KL in ``mixed``; the reverse KL has the rest."""
    jsd_beta: float = Field(0.5, gt=0, lt=1)
    """Share of the teacher in the mixture that ``jsd`` compares both with. Near 0 it acts as the forward KL does, near
    1 as the reverse KL, each at a small scale."""
    outside_topk: OutsideTopK = "tail"
    """Treatment of probability outside the ``topk`` tokens. ``tail``: it is one more outcome, on both sides.
    ``renormalize``: it is ignored, on both sides. ``zero``: the teacher is taken to have none, so that what the
    student has there is punished hard."""


class DistillationConfig(TopKDivergence, TeacherModels, TaughtConfig):
    """Distillation on the likeliest tokens of the teacher (GKD, arXiv:2306.13649)."""

    summary: ClassVar[str] = "On-policy distillation: KL to a teacher's likeliest tokens on the student's own responses"
    trainer: ClassVar[str] = "nemorl_distillation.trainer:DistillationTrainer"
    needs_capabilities: ClassVar[Mapping[str, frozenset[str]]] = {
        "teacher": frozenset({"topk_logprobs"}),
        "teachers": frozenset({"topk_logprobs"}),
        "policy": frozenset({"topk_logprobs"}),
    }

    algorithm: Literal["distillation"] = "distillation"
    """Name of the algorithm."""
    uncommon_weight: float = Field(1.0, ge=0)
    """Weight of the tokens that student and teacher do not have in common, where a teacher has ``align: text``: the L1
    distance of their probabilities, sorted. 0 leaves them to ``outside_topk`` and saves a forward pass."""
    dataset_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the prompts whose response is the dataset's (column ``response``) instead of the student's own: a
    teacher reads both. Some of it helps a student whose own responses are still useless; 1 never samples."""
    sft_loss_weight: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of the dataset's responses beside the divergence: the student learns from
    the text itself too, where its teacher is wrong or unsure. Needs ``dataset_fraction`` above 0."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.sft_loss_weight > 0 and not self.dataset_fraction:
            yield ConfigIssue(
                "sft_loss_weight",
                "there are no responses of the dataset to learn: dataset_fraction is 0",
                "raise dataset_fraction, or remove it",
            )
        if self.dataset_fraction > 0 and self.rollouts.mode == "async":
            yield ConfigIssue(
                "dataset_fraction",
                "asynchronous rollouts sample a response to every prompt",
                "set rollouts.mode: sync, or dataset_fraction: 0",
            )

    def _align_problems(self, path: str) -> Iterator[ConfigIssue]:
        if self.max_turns > 1:
            yield ConfigIssue(
                path,
                f"only single responses are written again in other tokens, and max_turns is {self.max_turns}",
                "set max_turns: 1, or choose a teacher with the student's tokenizer",
            )


class OPDConfig(TeacherModels, TaughtConfig):
    """Distillation by policy gradient on the sampled tokens alone: sampled reverse KL."""

    summary: ClassVar[str] = "On-policy distillation by policy gradient: the teacher's log-prob of each sampled token"
    trainer: ClassVar[str] = "nemorl_distillation.trainer:OPDTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {**TaughtConfig.metrics, **RATIO_METRICS, **SAMPLER_METRICS}

    algorithm: Literal["opd"] = "opd"
    """Name of the algorithm."""
    num_generations_per_prompt: int = Field(4, ge=1)
    """Responses of the student per prompt. Each token carries one number of the teacher, so more of them are needed
    than with ``distillation``."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """With several minibatches, the probability ratio is clipped below at 1 - this."""
    clip_high: float = Field(0.2, ge=0)
    """With several minibatches, the probability ratio is clipped above at 1 + this."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.generation.temperature == 0:
            yield ConfigIssue(
                "generation.temperature",
                "the reverse KL is estimated from sampled tokens, greedy ones are not samples",
                "use 1.0, or algorithm: distillation",
            )
