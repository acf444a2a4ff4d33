"""The options. The other projects are imported by ``build`` only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from nemorl.config import CodeName, Options, ServerURL
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import DatasetConfig, EnvironmentConfig
from nemorl_trust.encryption import plaintext_problem
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Environment
    from nemorl.types import Row


class ReasoningGymConfig(EnvironmentConfig):
    """Grades answers to the rows of the ``reasoning_gym`` dataset with the generator that made them."""

    summary: ClassVar[str] = "grades answers to reasoning-gym tasks"
    requires_modules: ClassVar[tuple[str, ...]] = ("reasoning_gym",)
    install_hint: ClassVar[str] = 'pip install "nemorl-agents[reasoning-gym]"'
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/scorer_error": MetricInfo(
            "Scorer errors", "share", "share of responses on which the generator's own scorer failed", "growth"
        ),
    }

    def build(self) -> Environment:
        from nemorl_agents.interop.reasoning_gym import ReasoningGym

        return ReasoningGym()


class ReasoningGymTasksConfig(DatasetConfig):
    """Generated tasks of reasoning-gym."""

    summary: ClassVar[str] = "generated tasks of reasoning-gym, no download"
    requires_modules: ClassVar[tuple[str, ...]] = ("reasoning_gym",)
    install_hint: ClassVar[str] = 'pip install "nemorl-agents[reasoning-gym]"'

    task: str = "chain_sum"
    """Name of the generator."""
    options: Options = Field(default_factory=dict)
    """Options of the generator, e.g. ``{max_terms: 3}``. Of ``composite``, which mixes generators,
    ``{datasets: [{name: chain_sum, weight: 2}, {name: sudoku, weight: 1, config: {max_empty: 40}}]}``."""
    num_train: int = Field(500, ge=1)
    """Distinct tasks to train on."""
    num_validation: int = Field(100, ge=0)
    """Distinct held-out tasks. 0: no validation split."""
    seed: int = Field(0, ge=0)
    """Chooses the tasks. The same seed and version of reasoning-gym give the same rows."""
    chat: bool = True
    """Ask in a chat message. Turn it off for base models."""
    instruction: str = "Give the final answer as <answer>…</answer>."
    """Follows every task. Empty for none."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        reserved = {"seed", "size"} & self.options.keys()
        if reserved:
            yield ConfigIssue("options", f"{', '.join(sorted(reserved))} is set elsewhere", "use seed and num_train")
        parts = self.options.get("datasets") or ()
        named = [isinstance(part, Mapping) and "name" in part for part in parts] if isinstance(parts, list) else []
        if self.task == "composite" and not (named and all(named)):
            what = "composite mixes the generators of a list, each with a name"
            yield ConfigIssue("options.datasets", what, "give [{name: chain_sum, weight: 1}, …]")

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_agents.interop.reasoning_gym import rows

        return rows(self).get(split) or None


class VerifiersConfig(EnvironmentConfig):
    """Scores the rows of the ``verifiers`` dataset with the rewards of their taskset."""

    summary: ClassVar[str] = "rewards of an installed taskset of verifiers"
    requires_modules: ClassVar[tuple[str, ...]] = ("verifiers",)
    install_hint: ClassVar[str] = 'pip install "nemorl-agents[verifiers]"'

    taskset: CodeName
    """Id of an installed taskset."""
    options: Options = Field(default_factory=dict)
    """Options of its config, the same as the dataset's."""

    def build(self) -> Environment:
        from nemorl_agents.interop.verifiers import Verifiers

        return Verifiers(self.taskset, self.options)


class VerifiersTasksConfig(DatasetConfig):
    """The tasks of a taskset of verifiers, as rows."""

    summary: ClassVar[str] = "tasks of an installed taskset of verifiers"
    requires_modules: ClassVar[tuple[str, ...]] = ("verifiers",)
    install_hint: ClassVar[str] = 'pip install "nemorl-agents[verifiers]"'

    taskset: CodeName
    """Id of an installed taskset."""
    options: Options = Field(default_factory=dict)
    """Options of its config."""
    max_rows: int | None = Field(None, ge=1)
    """Tasks read, from the first. Required by tasksets without end."""
    num_validation: int = Field(0, ge=0)
    """Tasks held out, from the first. 0: no validation split."""

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_agents.interop.verifiers import rows

        return rows(self).get(split) or None


class OpenEnvConfig(EnvironmentConfig):
    """Talks with an OpenEnv server: a session per episode, an action per response."""

    summary: ClassVar[str] = "multi-turn client of an OpenEnv server"
    requires_modules: ClassVar[tuple[str, ...]] = ("openenv",)
    install_hint: ClassVar[str] = 'pip install "nemorl-agents[openenv]"'
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/action_refused": MetricInfo(
            "Actions refused", "share", "share of responses that the server fails at", "growth: see the server's log"
        ),
    }

    url: ServerURL = Field(pattern=r"^(https?|wss?)://")
    """Address of the server."""
    plaintext: bool = False
    """Let responses go to another machine over ``http`` or ``ws`` all the same."""
    action: Options = Field(default_factory=lambda: {"message": "{response}"})
    """The action that a response becomes. ``{response}`` in its texts stands for the response."""
    text_field: str = "message"
    """Field of an observation that the policy reads."""
    turn_template: str = "\n{text}\n"
    """How that text reaches the policy; for chat models write the template's turn markers around ``{text}``."""
    reset_column: str = "reset"
    """Column with what goes to the server's ``reset``, where rows have it."""
    message_timeout_s: float = Field(60.0, gt=0)
    """Seconds that the server may take for one message; then the run ends with an error. The pool's
    ``environment_timeout_s``, if shorter, scores 0 instead."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not self.plaintext and (problem := plaintext_problem(self.url)) is not None:
            yield ConfigIssue("url", *problem)
        if "{response}" not in str(self.action):
            yield ConfigIssue("action", "no text contains {response}", "write {response} where the response goes")
        if "{text}" not in self.turn_template:
            yield ConfigIssue("turn_template", "does not contain {text}", "write {text} where the server's text goes")

    def build(self) -> Environment:
        from nemorl_agents.interop.openenv import OpenEnv

        return OpenEnv(self)
