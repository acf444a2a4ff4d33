"""The options of the environments. Those of the datasets are in ``datasets.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from nemorl.base.text.suggest import did_you_mean
from nemorl.config.base import Config
from nemorl.config.component import Component
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import EnvironmentConfig, ReportSectionConfig
from pydantic import Field, WithJsonSchema

if TYPE_CHECKING:
    from nemorl.contracts import Environment

    from nemorl_tasks.environments.sliding_puzzle import Games

# A part may be a composition itself, so that its schema cannot be spelled out in full: it would never end.
PART_SCHEMA: dict[str, Any] = {
    "description": "Name of an environment, or a mapping with `name` and its options.",
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    ],
}


class PartConfig(Config):
    """One environment of several."""

    environment: Annotated[EnvironmentConfig, Component("environments"), WithJsonSchema(PART_SCHEMA)]
    """Name of an installed environment, or a mapping with ``name`` and its options."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of its reward in the sum. Negative for a penalty, 0 to log it only."""


class StageConfig(PartConfig):
    """One environment of several in a row."""

    threshold: float = Field(0.5, allow_inf_nan=False)
    """Rewards below this end the chain. Between the rewards of a failure and of a success."""


class WeightedConfig(EnvironmentConfig):
    """The weighted sum of several environments; each one's own reward is logged as ``reward/<part>``."""

    summary: ClassVar[str] = "weighted sum of several environments"

    parts: dict[str, PartConfig] = Field(min_length=1)
    """Name -> environment and weight."""
    lead: str | None = None
    """The part that says what is correct and leads a conversation. Unset: the first."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.lead is not None and self.lead not in self.parts:
            hint = did_you_mean(self.lead, self.parts) or f"name one of {', '.join(self.parts)}"
            yield ConfigIssue("lead", f"no part is named {self.lead!r}", hint)

    def build(self) -> Environment:
        from nemorl_rl.environments import Part, WeightedEnvironment

        parts = {name: Part(part.environment, part.weight) for name, part in self.parts.items()}
        return WeightedEnvironment(parts, lead=self.lead)


class ChainConfig(EnvironmentConfig):
    """Environments in order, up to the first whose reward is below its threshold: a cheap gate, then a costly judge."""

    summary: ClassVar[str] = "environments in order, stopping at the first that is not passed"

    parts: dict[str, StageConfig] = Field(min_length=1)
    """Name -> environment, weight and threshold, in the order to ask them. The last one says what is correct and leads
    a conversation."""

    def build(self) -> Environment:
        from nemorl_rl.environments import ChainEnvironment, Stage

        parts = {name: Stage(part.environment, part.weight, part.threshold) for name, part in self.parts.items()}
        return ChainEnvironment(parts)


class ExactMatchConfig(EnvironmentConfig):
    """Reward 1 when the response is the row's ``answer``, spaces around it aside."""

    summary: ClassVar[str] = "1 when the response equals the answer"

    ignore_case: bool = False
    """Treat upper and lower case alike."""
    contains: bool = False
    """Accept the answer anywhere in the response. A policy can then earn the reward by listing candidates."""

    def build(self) -> Environment:
        from nemorl_tasks.environments.graders import ExactMatch

        return ExactMatch(self)


class MultipleChoiceConfig(EnvironmentConfig):
    """Reward 1 when the letter that the response names last, as in ``Answer: C``, is the row's ``answer``."""

    summary: ClassVar[str] = "1 when the response ends with the letter of the right option"

    answer_words: tuple[str, ...] = ()
    """More words that may stand before the colon and the letter. ``Answer`` is known, and what it is in 14 other
    languages."""
    boxed: bool = True
    """Where no such line is found, take the letter in the last ``\\boxed{…}``."""

    def build(self) -> Environment:
        from nemorl_tasks.environments.multiple_choice import MultipleChoice

        return MultipleChoice(self)


class FormatConfig(EnvironmentConfig):
    """Reward 1 when the whole response has a form, whatever it says: tags in order, or a regular expression. Less for a
    part of it where ``credit`` says so."""

    summary: ClassVar[str] = "1 when the response has the right form, or a share for parts of it"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/pattern_timeout": MetricInfo(
            "Pattern timeouts", "share", "share of responses that earned 0 because matching them took over 0.2 s"
        )
    }

    tags: tuple[Annotated[str, Field(pattern=r"^\w+$")], ...] = ()
    """The response is these elements in order, each once, with text in them and only space between:
    ``[think, answer]`` asks for ``<think>…</think><answer>…</answer>``."""
    pattern: str | None = None
    """A regular expression that the whole response matches; a dot matches line ends too. A response that keeps the
    search busy for 0.2 s, as repetitions of alternatives such as ``(a|aa)*`` let it, earns 0 and counts in
    ``train/environment/pattern_timeout``."""
    credit: Literal["whole", "elements", "tags"] = "whole"
    """Parts of the form that earn their share. ``whole``: none, it is all or nothing. ``elements``: each element that
    stands in the response once, closed and with text in it. ``tags``: each opening and each closing tag that occurs
    once. Partial credit leads a policy to a form that it would never hit by chance."""
    shares: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field({})
    """Share of each element, e.g. ``{think: 0.25, answer: 0.75}``; opening and closing tag have half of it each. Unset:
    equal shares that add up to 1."""
    max_chars: int = Field(20_000, ge=1)
    """Longer responses have the wrong form. Bounds what ``pattern`` can cost."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if bool(self.tags) == (self.pattern is not None):
            seen = "both are set" if self.tags else "neither is set"
            yield ConfigIssue("tags", f"the form is given by tags or by pattern, and {seen}", "set one of them")
        if len(set(self.tags)) != len(self.tags):
            yield ConfigIssue("tags", f"{', '.join(self.tags)} names one twice", "name each tag once")
        if self.credit != "whole" and not self.tags:
            yield ConfigIssue(
                "credit", "a regular expression has no parts to give credit for", "set tags, or leave it out"
            )
        if self.shares and (self.credit == "whole" or set(self.shares) != set(self.tags)):
            fix = f"name each of {', '.join(self.tags) or 'the tags'} and set credit to elements or tags"
            yield ConfigIssue("shares", f"shares of {', '.join(self.shares)} are not what is paid", fix)
        if self.pattern is not None:
            from nemorl_tasks.environments.graders import BoundedPattern

            try:
                BoundedPattern(self.pattern)
            except ValueError as error:
                yield ConfigIssue("pattern", f"no regular expression: {error}", "mend it, or escape special characters")

    def build(self) -> Environment:
        from nemorl_tasks.environments.graders import Format

        return Format(self)


class RepetitionConfig(EnvironmentConfig):
    """A penalty for saying things again, to add to another reward: 0 when no run of words occurs twice, down to
    ``-max_penalty``."""

    summary: ClassVar[str] = "penalty for repeated runs of words"

    run_length: int = Field(3, ge=1)
    """Words (or characters) of a run. Longer runs spare set phrases and see only copied sentences."""
    max_penalty: float = Field(1.0, ge=0, allow_inf_nan=False)
    """The penalty of a response that would only repeat itself; others get the share of their runs that are repeats."""
    of: Literal["words", "characters"] = "words"
    """Characters for languages that put no space between words."""

    def build(self) -> Environment:
        from nemorl_tasks.environments.graders import Repetition

        return Repetition(self)


class ExactAlnumConfig(EnvironmentConfig):
    """Reward 1 when the letters and digits in ``<answer>…</answer>`` are those of the row's ``answer``, case aside:
    ``<answer> Yes. </answer>`` for ``yes``. Signs and points do not count: ``-1.5`` is ``15``."""

    summary: ClassVar[str] = "1 when the `<answer>` has the letters and digits of the answer"

    tag: str = Field("answer", pattern=r"^\w+$")
    """Element that holds the answer."""

    def build(self) -> Environment:
        from nemorl_tasks.environments.elements import ExactAlnum

        return ExactAlnum(self)


class BboxGiouConfig(EnvironmentConfig):
    """Reward by how well the box in ``<answer>…</answer>`` covers the row's ``answer``, both ``[x1, y1, x2, y2]``: the
    generalised intersection over union, 1 for the same box and down to -1 for boxes far apart. 0 where there is no
    box."""

    summary: ClassVar[str] = "generalised intersection over union of the box in `<answer>` and the answer"

    tag: str = Field("answer", pattern=r"^\w+$")
    """Element that holds the box."""
    plain_from: float | None = Field(None, ge=0, le=1)
    """From this intersection over union on, it is the reward itself; below it is generalised, so that boxes which do
    not meet still earn more the closer they are. Unset: always generalised."""

    def build(self) -> Environment:
        from nemorl_tasks.environments.elements import BboxGiou

        return BboxGiou(self)


class CodeJaccardConfig(EnvironmentConfig):
    """Reward from 0 to 1 for words in common with the row's ``answer``: for code (or text) that cannot be run. A policy
    earns it by looking like the reference, so run the code where you can (``code``)."""

    summary: ClassVar[str] = "share of words in common with a reference, for code that cannot be run"

    length_penalty: bool = True
    """Multiply by the shorter length over the longer one, as NeMo RL does. Without it a response is not held back for
    being far shorter or longer than the reference."""
    ignore_case: bool = True
    """Treat upper and lower case alike, as NeMo RL does."""

    def build(self) -> Environment:
        from nemorl_tasks.environments.graders import CodeJaccard

        return CodeJaccard(self)


class ConversationConfig(EnvironmentConfig):
    """Common options of environments of several turns."""

    turn_template: str = "\n{text}\n"
    """How the environment's text reaches the policy; ``{text}`` stands for it. For chat models write what the template
    puts around a user message, from the end of the assistant's to its next beginning, e.g. for ChatML
    ``"\\n<|im_start|>user\\n{text}<|im_end|>\\n<|im_start|>assistant\\n"``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if "{text}" not in self.turn_template:
            yield ConfigIssue(
                "turn_template", "does not contain {text}", "write {text} where the environment's text goes"
            )

    def observation(self, text: str) -> str:
        """The environment's text as the policy reads it."""
        return self.turn_template.replace("{text}", text)


class SlidingPuzzleConfig(ConversationConfig):
    """The game of sliding tiles: one move per turn, reward 1 when the board is in order. Set ``max_turns`` of the
    algorithm to the moves a policy may make."""

    summary: ClassVar[str] = "multi-turn game: slide tiles into order, one move per turn"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/moves": MetricInfo("Moves", "per episode", "moves of an episode, legal or not", smooth=True),
        "train/environment/illegal_moves": MetricInfo(
            "Moves", "per episode", "responses of an episode that are no legal move", "no fall", smooth=True
        ),
    }

    max_moves: int = Field(50, ge=1)
    """Moves, legal or not, before the game is lost."""
    illegal_penalty: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Taken off the reward for every response that is no legal move. Small, or the policy prefers not to play."""

    def build(self) -> Environment:
        from nemorl_tasks.environments.sliding_puzzle import SlidingPuzzle

        return SlidingPuzzle(self)


class CalculatorConfig(ConversationConfig):
    """A tool to call: the policy writes an expression, reads its value, and answers. Reward 1 for the right answer.

    A response that ends with ``<tool>12*7</tool>``, or with the JSON tool call that chat templates produce, is a call
    and is answered with ``<result>84</result>``; any other response is final.
    """

    summary: ClassVar[str] = "tool use: the policy calls a calculator, then answers"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/tool_calls": MetricInfo(
            "Tool calls", "per episode", "calls of an episode", "a fall to 0: the policy guesses instead", smooth=True
        ),
        "train/environment/tool_errors": MetricInfo(
            "Tool calls", "per episode", "calls of an episode whose expression had no value", "no fall", smooth=True
        ),
    }

    max_calls: int = Field(4, ge=0)
    """Calls per episode; one more ends it with reward 0. The algorithm's ``max_turns`` should be one higher."""
    require_tool: bool = False
    """Right answers earn the reward only after a call that had a value."""

    def build(self) -> Environment:
        from nemorl_tasks.environments.calculator import Calculator

        return Calculator(self)


class SlidingPuzzleSectionConfig(ReportSectionConfig):
    """Games of the sliding puzzle with the board after each move."""

    summary: ClassVar[str] = "games of the sliding puzzle: the board after each move"

    def build(self) -> Games:
        from nemorl_tasks.environments.sliding_puzzle import Games

        return Games()
