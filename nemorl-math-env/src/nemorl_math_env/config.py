"""The options of the ``math`` environment and the generated datasets. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from nemorl.config.base import RESUMABLE, Config
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import DatasetConfig, EnvironmentConfig
from pydantic import Field

from nemorl_math_env import arithmetic, word_problems
from nemorl_math_env.answers import DEFAULT_MARKERS

if TYPE_CHECKING:
    from nemorl.contracts import Environment
    from nemorl.types import Row


class GraderConfig(EnvironmentConfig):
    """Common options of environments that compare answers by algebra."""

    requires_modules: ClassVar[tuple[str, ...]] = ("mpmath", "pebble")
    install_hint: ClassVar[str] = "pip install nemorl-math-env"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/unparsable": MetricInfo(
            "Answers that cannot be graded",
            "share",
            "share of responses that hold no final answer",
            "no fall in the first steps: say in the prompt how to mark the answer",
            smooth=True,
        ),
        "train/environment/grader_timeout": MetricInfo(
            "Answers that cannot be graded",
            "share",
            "share of responses whose grading ran out of time",
            "above a percent: raise `timeout_s`, or the policy has found formulas that exhaust the grader",
        ),
        "train/environment/grader_crash": MetricInfo(
            "Answers that cannot be graded",
            "share",
            "share of responses whose grading died",
            "anything above 0 that stays: raise `memory_gib`",
        ),
    }

    timeout_s: float = Field(5.0, gt=0)
    """Seconds that the comparison of one formula may take; then it scores 0 and counts in ``grader_timeout``. Raise it
    when that metric is high and the answers are genuinely long formulas."""
    workers: Annotated[int, RESUMABLE] = Field(2, ge=1, le=128)
    """Grader processes. They start when the first answer needs algebra; numbers never do. Raise it for datasets of
    formulas, up to the CPU cores that generation leaves free."""
    memory_gib: float = Field(4.0, ge=1.0, le=1e6)
    """Memory limit of one grader process in GiB, so that ``9^{9^{9}}`` cannot take the machine down."""
    accept_unevaluated: bool = False
    r"""Accept ``12 + 7``, ``5!`` or ``\sqrt{361}`` where the answer is a number. Off, because copying the question
    would earn the reward."""


class MathConfig(GraderConfig):
    """Reward 1 when the final answer of a response equals the row's ``answer``, else 0."""

    summary: ClassVar[str] = "grades final answers: exact numbers at once, formulas by algebra"

    require_marker: bool = False
    r"""Accept marked answers only (``\boxed{…}`` or one of ``answer_markers``); others count in ``unparsable``.
    Turn it on to teach the format as well."""
    answer_markers: tuple[str, ...] = DEFAULT_MARKERS
    r"""Phrases that an answer follows, in any case. ``\boxed{…}`` and ``<answer>…</answer>`` always count. The last
    marked answer is graded."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if any(not marker.strip() for marker in self.answer_markers):
            yield ConfigIssue("answer_markers", "an empty marker would match everywhere", "remove it")

    def build(self) -> Environment:
        from nemorl_math_env.environment import MathEnvironment

        return MathEnvironment(self)


class MathExpressionConfig(GraderConfig):
    """Reward 1 when ``<answer>…</answer>`` holds the same number or formula as the row's ``answer``, else 0. ``math``
    finds answers that are written in other ways too."""

    summary: ClassVar[str] = "1 when the `<answer>` equals the answer, by number or by algebra"

    tag: str = Field("answer", pattern=r"^\w+$")
    """Element that holds the answer."""

    def build(self) -> Environment:
        from nemorl_math_env.elements import MathExpression

        return MathExpression(self)


class Geo3kConfig(GraderConfig):
    r"""Reward of a right answer in the last ``\boxed{…}``, and a little for the form: a box after ``</think>``. The
    reward of verl and NeMo RL for Geometry3K and MMPR-Tiny."""

    summary: ClassVar[str] = "the last `\\boxed{…}` is right, and a little for a box after `</think>`"

    format_weight: float = Field(0.1, ge=0, le=1)
    """Share of the form in the reward; the rest is for the answer."""

    def build(self) -> Environment:
        from nemorl_math_env.elements import Geo3k

        return Geo3k(self)


class DapoMathConfig(EnvironmentConfig):
    """Reward 1 when the text after the last ``Answer:`` is the row's ``answer``, in Minerva's normal form: the
    verification of DAPO (arXiv:2503.14476), for comparing with its results. ``math`` compares values instead."""

    summary: ClassVar[str] = "DAPO's verification: the text after the last `Answer:`"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/unparsable": MathConfig.metrics["train/environment/unparsable"],
    }

    wrong_reward: float = Field(0.0, lt=1, allow_inf_nan=False)
    """Reward of a wrong answer, or none. DAPO and verl give -1, NeMo RL 0."""
    last_chars: int = Field(300, ge=1, le=5000)
    """The part of a response, from its end, in which the answer is looked for."""

    def build(self) -> Environment:
        from nemorl_math_env.dapo import DapoMath

        return DapoMath(self)


class MultiRewardMathConfig(EnvironmentConfig):
    """Three rewards of 0 or 1 that add up: ``correctness`` (the text in ``<answer>`` is the row's ``answer``),
    ``integer`` (it consists of digits) and ``format`` (``<think>…</think>``, a line end, ``<answer>…</answer>`` and
    nothing else). Each is logged and kept apart, for GDPO to normalise one by one."""

    summary: ClassVar[str] = "three rewards: the right answer, an integer, the right form"

    def build(self) -> Environment:
        from nemorl_math_env.multi_reward import MultiRewardMath

        return MultiRewardMath(self)


class _Generated(Config):
    """Options that the generated datasets have in common."""

    num_train: int = Field(500, ge=1)
    """Distinct problems to train on."""
    num_validation: int = Field(100, ge=0)
    """Distinct held-out problems, none of which occurs in training. 0: no validation split."""
    seed: int = Field(0, ge=0)
    """Chooses the problems. The same seed gives the same rows everywhere."""

    def _too_many(self, available: int, fix: str) -> Iterator[ConfigIssue]:
        wanted = self.num_train + self.num_validation
        if wanted > available:
            message = f"{self.num_train} + {self.num_validation} validation = {wanted} problems asked for, "
            yield ConfigIssue("num_train", f"{message}but these options allow {available} distinct ones", fix)


class ArithmeticConfig(_Generated, DatasetConfig):
    """Sums, differences and products of two numbers: ``12+7=`` -> ``19``. ``3+4`` and ``4+3`` are one problem."""

    summary: ClassVar[str] = "generated sums, differences and products, no download"

    operations: tuple[Literal["+", "-", "*"], ...] = Field(("+",), min_length=1)
    """Operations to mix; each contributes in proportion to its number of problems."""
    max_digits: int | None = Field(None, ge=1, le=9)
    """Digits of the largest operand. Unset: 2, unless ``max_value`` says otherwise."""
    min_value: int = Field(0, ge=0)
    """Smallest operand."""
    max_value: int | None = Field(None, ge=0, lt=10**9)
    """Largest operand, in place of ``max_digits``."""
    allow_negative: bool = False
    """Let differences be negative."""
    chat: bool = False
    """Ask in a chat message instead of the bare ``12+7=``. Turn it on for instruction-tuned models."""
    instruction: str = "What is {problem}? Reply with the number only."
    """The chat message; ``{problem}`` stands for ``12+7``."""

    @property
    def largest(self) -> int:
        """The largest operand."""
        return 10 ** (self.max_digits or 2) - 1 if self.max_value is None else self.max_value

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if len(set(self.operations)) != len(self.operations):
            yield ConfigIssue("operations", f"{', '.join(self.operations)} names one twice", "name each operation once")
        if "{problem}" not in self.instruction:
            yield ConfigIssue("instruction", "does not contain {problem}", "write {problem} where the task goes")
        if self.max_digits is not None and self.max_value is not None:
            yield ConfigIssue("max_value", "max_digits and max_value both set the largest operand", "keep one of them")
        if self.min_value > self.largest:
            message = f"smallest operand {self.min_value} is above the largest, {self.largest}"
            yield ConfigIssue("min_value", message, "lower min_value, or raise max_value or max_digits")
        else:
            available = arithmetic.num_problems(self)
            yield from self._too_many(available, "lower num_train, or raise max_digits, or add operations")

    def build(self, split: str) -> Sequence[Row] | None:
        return _rows_or_none(arithmetic.build_rows(self, split), split)


class WordProblemsConfig(_Generated, DatasetConfig):
    """Short arithmetic stories in English with whole-number answers."""

    summary: ClassVar[str] = "generated arithmetic word problems in English, no download"

    difficulty: Literal[1, 2, 3] = 1
    """Steps to the answer, and number sizes: 1 has one step and numbers up to 12, 2 has two and up to 20, 3 has
    three and up to 100. Start at 1 for models below 1B parameters."""
    chat: bool = True
    """Ask in a chat message. Turn it off for base models, which then get the same text as a raw prompt."""
    instruction: str = "Solve the problem. End with 'Answer: <number>'."
    """Follows every problem, for the format that the grader reads. Empty for none."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from self._too_many(word_problems.num_problems(self), "lower num_train, or raise difficulty")

    def build(self, split: str) -> Sequence[Row] | None:
        return _rows_or_none(word_problems.build_rows(self, split), split)


def _rows_or_none(rows: Sequence[Row], split: str) -> Sequence[Row] | None:
    """Only ``train`` and ``validation`` exist, and an empty validation split does not."""
    return rows if split in {"train", "validation"} and len(rows) else None
