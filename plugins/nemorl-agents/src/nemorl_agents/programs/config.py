"""The options of the ``agent`` environment. Nothing heavy is imported here."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from nemorl.base.text.suggest import did_you_mean
from nemorl.config import RESUMABLE, CodeName, Command, Config, Names, ServerURL, Variables
from nemorl.config.component import Component
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl_rl.agents.gateways import GatewayConfig, gateway_is_installed
from nemorl_rl.agents.outcomes import OUTCOME_METRICS, Fate, outcome_problems
from nemorl_rl.agents.seats import SeatUse, seat_problems
from nemorl_rl.environments.references import FORM, reference_problems
from nemorl_trust.encryption import plaintext_problem
from pydantic import Field, WithJsonSchema

if TYPE_CHECKING:
    from nemorl.contracts import Environment


CHAT_LOOP = "chat_loop"


REWARD_SCHEMA: dict[str, Any] = {
    "description": "`file.py:function`, the name of an environment, or a mapping with `name` and its options.",
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    ],
}


class MCPServerConfig(Config):
    """A server of tools that speaks the Model Context Protocol: a command or an address."""

    command: Command = ()
    """Started for every episode, spoken to over its standard input and output, ended with the episode."""
    env: Variables = Field({})
    """Variables of the command, beside a few harmless ones of nemorl's process."""
    url: ServerURL | None = Field(None, pattern=r"^https?://")
    """Of a server that runs already (streamable HTTP). All episodes share it."""
    plaintext: bool = False
    """Let calls go to another machine over ``http`` all the same."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if bool(self.command) == (self.url is not None):
            seen = "both are set" if self.command else "neither is set"
            yield ConfigIssue("", f"a server is given by command or by url, and {seen}", "set one of them")
        if self.url is not None and not self.plaintext and (problem := plaintext_problem(self.url)) is not None:
            yield ConfigIssue("url", *problem)


class ToolsConfig(Config):
    """The tools that the policy may call."""

    functions: tuple[Annotated[CodeName, Field(pattern=FORM)], ...] = ()
    """Python functions, ``file.py:function``. Name, parameters and docstring are what the policy is told of them."""
    mcp: tuple[MCPServerConfig, ...] = ()
    """Servers of tools (``pip install "nemorl-agents[mcp]"``)."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds that one call may take; then the policy is told so."""
    max_result_chars: int = Field(20_000, ge=1)
    """Longer results are cut, and say so."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.mcp and importlib.util.find_spec("mcp") is None:
            fix = 'pip install "nemorl-agents[mcp]"'
            yield ConfigIssue("mcp", "tools of MCP servers need the package mcp, which cannot be found", fix, here=True)
        for number, reference in enumerate(self.functions):
            yield from reference_problems(f"functions.{number}", reference)


class AgentConfig(EnvironmentConfig):
    """An agent drives the policy: a program, a Python coroutine, or the built-in loop of tool calls."""

    summary: ClassVar[str] = "a program, coroutine or tool loop that calls the policy as it likes"
    drives_policy: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **OUTCOME_METRICS,
        "train/environment/tool_calls": MetricInfo(
            "Tool calls", "calls per episode", "tools called by the built-in loop, or through `tools`", smooth=True
        ),
        "train/environment/tool_errors": MetricInfo(
            "Tool errors",
            "calls per episode",
            "tool calls that were answered by an error",
            "no fall in the first steps",
        ),
    }

    command: Command = ()
    """A program to run per episode, with its arguments. ``{prompt}`` and ``{row[COLUMN]}`` in them stand for the task,
    which also comes on standard input. Names of files here are passed as absolute paths."""
    rollout: CodeName = Field(CHAT_LOOP, pattern=rf"^{CHAT_LOOP}$|{FORM}")
    """Without ``command``: a coroutine ``async def rollout(prompt, policy)`` as ``file.py:function``, or ``chat_loop``,
    which answers tool calls until a message has none."""
    reward: Annotated[EnvironmentConfig, Component("environments"), WithJsonSchema(REWARD_SCHEMA)] | None = None
    """The scorer of the answer: ``file.py:function``, or an environment of one turn. A coroutine may return its score
    instead."""
    answer: str = Field("", pattern=r"^(|stdout|last_message|file:.+)$")
    """The text that is scored: the last line of ``stdout``, the policy's ``last_message``, or ``file:NAME`` in the
    agent's folder. Unset: ``stdout`` of a program, else ``last_message``."""
    outcomes: dict[str, Fate] = Field({})
    """The score of episodes that did not end well: a number; ``null`` where it says nothing about the policy, so that
    nothing is learnt from it; ``reward`` to score it all the same; ``error`` to end the run. Of ``crashed``,
    ``timeout``, ``no_calls``, ``stopped``; 0 where unset."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds of an episode, the policy's answers included. Unset: what ``rollouts.episode_timeout_s`` leaves."""
    seats: dict[str, SeatUse] = Field({})
    """Roles that the policy plays and learns nothing from, by name: ``untrained``. ``frozen``, the policy's initial
    weights, is what no engine can play."""
    gateway: GatewayConfig = GatewayConfig()
    """Of a program: how it may call the policy."""
    system: str | None = None
    """Of ``chat_loop``: a system message before the task, where the row has none."""
    tools: ToolsConfig = ToolsConfig()
    """The tools that ``chat_loop`` lets the policy call; a coroutine gets it where it has a parameter ``tools``."""
    files: Annotated[dict[str, str], Names("text")] = Field({})
    """Of a program: files of its folder, each with the column that holds its text (other data become JSON)."""
    copy_in: tuple[Path, ...] = ()
    """Of a program: files and folders here that are copied into its folder."""
    hidden_columns: tuple[str, ...] = ("answer",)
    """Columns that no agent sees, neither in ``NEMORL_TASK`` nor in ``{row[…]}``."""
    env: Variables = Field({})
    """More variables of a program. Of nemorl's own it gets ``PATH``, language and time zone, no keys."""
    sandbox: bool = False
    """Confine programs (Linux 6.12): they read the system, the interpreter and the folders of the command's files,
    write in their own folder, connect to the gateway's port, and signal nobody else."""
    readable: tuple[Path, ...] = ()
    """With ``sandbox``: what programs may read besides, e.g. a corpus or a model's folder."""
    output_kib: Annotated[int, RESUMABLE] = Field(64, ge=1, le=2**20)
    """Size of the kept end of a program's output, and as much of its errors, in KiB."""
    memory_mib: int | None = Field(None, ge=64)
    """Address space of each of a program's processes, in MiB. Unset: no limit."""
    file_mib: int | None = Field(None, ge=1)
    """Size of any one file that a program writes, in MiB. Unset: no limit."""
    keep_folders: Annotated[Path | None, RESUMABLE] = None
    """Where the folders of episodes are made, and stay, with their output beside them. Unset: they are removed."""
    give_up_after: Annotated[int, RESUMABLE] = Field(8, ge=1)
    """As many first episodes that all got no answer of the policy end the run with an error: a missing module, a typo,
    another server's address."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from self._reference_problems()
        yield from outcome_problems(self.outcomes)
        yield from seat_problems(self.seats)
        if self.rollout == CHAT_LOOP and self.reward is None:
            yield ConfigIssue("reward", "nothing scores what the agent does", 'set reward, e.g. "rewards.py:correct"')
        if self.command and self.rollout != CHAT_LOOP:
            yield ConfigIssue("rollout", "a program is run, or a coroutine, and both are set", "set one of them")
        if self.sandbox and not self.command:
            yield ConfigIssue("sandbox", "a coroutine runs in nemorl's own process", "set command, or leave it out")
        if self.command and not gateway_is_installed():
            what = "a program needs a server to call the policy by, and no installed package has one"
            yield ConfigIssue("command", what, "pip install nemorl-agents", here=True)
        if not self.command and self.answer == "stdout":
            yield ConfigIssue("answer", "a coroutine has no standard output", "use last_message, or return the answer")
        hidden = {*self.hidden_columns}
        shown = {column for argument in self.command for column in re.findall(r"\{row\[([^\]]+)\]\}", argument)}
        for column in sorted((shown | {*self.files.values()}) & hidden):
            yield ConfigIssue("hidden_columns", f"the agent is given {column!r}, which is hidden", "change one of them")

    def _reference_problems(self) -> Iterator[ConfigIssue]:
        if self.command and shutil.which(self.command[0], path=search_path()) is None:
            what = f"there is no program {self.command[0]!r} here"
            yield ConfigIssue("command", what, "install it, or give its path", here=True)
        made = {*self.files, *(path.name for path in self.copy_in)}
        for argument in self.command[1:]:
            if argument.endswith(".py") and argument not in made and not Path(argument).is_file():
                near = did_you_mean(argument, [path.name for path in Path().glob("*.py")])
                yield ConfigIssue("command", f"{argument} does not exist", near or "correct the path", here=True)
        if self.rollout != CHAT_LOOP:
            yield from reference_problems("rollout", self.rollout)
        for name, paths in (("copy_in", self.copy_in), ("readable", self.readable)):
            for path in paths:
                if not path.exists():
                    yield ConfigIssue(name, f"{path} does not exist", "correct the path", here=True)

    def build(self) -> Environment:
        from nemorl_agents.programs.build import environment_of

        return environment_of(self)


def search_path() -> str:
    """``PATH`` of agents: the folder of this interpreter first, so that ``python`` is the one that runs nemorl."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
