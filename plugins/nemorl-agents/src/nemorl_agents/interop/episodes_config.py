"""The options of environments that other projects play with our gateway as their model server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from nemorl.config import (
    RESUMABLE,
    CodeName,
    Command,
    Config,
    DatasetFile,
    FileName,
    Interpreter,
    Options,
    ServerURL,
    Variables,
)
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import DatasetConfig, EnvironmentConfig
from nemorl_rl.agents.gateways import GatewayConfig, gateway_is_installed
from nemorl_rl.agents.outcomes import OUTCOME_METRICS, Fate, outcome_problems
from nemorl_rl.agents.seats import SeatUse, seat_problems
from nemorl_trust.encryption import plaintext_problem
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Environment
    from nemorl.types import Row

GYM_COLUMN, GYM_PARAMS = "nemo_gym", "responses_create_params"
"""The column that holds a task of NeMo-Gym, and its field with the request of the agent."""


class PlayedConfig(EnvironmentConfig):
    """The fields that they share."""

    drives_policy: ClassVar[bool] = True
    outcomes: dict[str, Fate] = Field({})
    """The score of episodes that did not end well: a number; ``null`` where it says nothing about the policy, so that
    nothing is learnt from it; ``reward`` to take the reward that was given all the same; ``error`` to end the run. Of
    ``crashed``, ``timeout``, ``no_calls``, ``stopped``; 0 where unset."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds of an episode, the policy's answers included. Unset: what ``rollouts.episode_timeout_s`` leaves."""
    gateway: GatewayConfig = GatewayConfig()
    """How the policy may be called."""
    give_up_after: Annotated[int, RESUMABLE] = Field(8, ge=1)
    """As many first episodes that all got no answer of the policy end the run with an error."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from outcome_problems(self.outcomes)
        if not gateway_is_installed():
            what = "it calls the policy over HTTP, and no installed package has a server for that"
            yield ConfigIssue("", what, "pip install nemorl-agents", here=True)


class VerifiersOptions(Config):
    """Which environment of verifiers, and under which interpreter."""

    taskset: CodeName
    """Id of an installed taskset."""
    options: Options = Field({})
    """Options of its config."""
    env: Options = Field({})
    """The ``[env]`` block of verifiers, but for the taskset: ``id`` of an environment that plays the tasks, the seats
    with their ``harness``, ``runtime``, ``max_turns``, ``client``, and ``timeout``."""
    python: Interpreter | None = None
    """The interpreter that has verifiers and the taskset. Unset: the one that runs nemorl."""
    variables: Variables = Field({})
    """Environment variables of its process, besides those of nemorl's."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if "taskset" in self.env:
            yield ConfigIssue("env.taskset", "the taskset is set elsewhere", "use taskset and options")
        if "id" in self.options:
            yield ConfigIssue("options.id", "the taskset's id is set elsewhere", "use taskset")
        if self.python is not None and not self.python.expanduser().is_file():
            yield ConfigIssue("python", f"{self.python} does not exist", "give the path of an interpreter", here=True)


class VerifiersEnvConfig(VerifiersOptions, PlayedConfig):
    """Plays whole episodes of a verifiers environment: harness, tools, several turns, several agents."""

    summary: ClassVar[str] = "episodes of a verifiers v1 environment, in a process of its own"
    seats: dict[str, SeatUse] = Field({})
    """Roles that the policy plays and learns nothing from, by name: ``untrained``. A role with a model of its own needs
    none; ``frozen``, the policy's initial weights, is what no engine can play."""
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **OUTCOME_METRICS,
        "train/environment/turns": MetricInfo(
            "Turns", "turns per agent", "answers of the policy on the record of verifiers, per seat that it plays"
        ),
    }

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from seat_problems(self.seats)

    def build(self) -> Environment:
        from nemorl_agents.interop.verifiers_env import VerifiersEnv

        return VerifiersEnv(self)


class VerifiersEnvTasksConfig(VerifiersOptions, DatasetConfig):
    """The tasks of a taskset of verifiers, read by the interpreter that has it."""

    summary: ClassVar[str] = "tasks of a verifiers taskset, for the environment verifiers_env"

    max_rows: int | None = Field(None, ge=1)
    """Tasks read, from the first. Required by tasksets without end."""
    num_validation: int = Field(0, ge=0)
    """Tasks held out, from the first. 0: no validation split."""

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_agents.interop.verifiers_env import rows

        return rows(self).get(split) or None


class StartGymConfig(Config):
    """NeMo-Gym's own command, run for as long as nemorl runs."""

    config_paths: tuple[FileName, ...] = Field(min_length=1)
    """Gym's configs: of resources servers with their agents, and of a model server that forwards to
    ``policy_base_url`` (``responses_api_models/openai_model/configs/openai_model.yaml``)."""
    command: Command = Field(("ng_run",), min_length=1)
    """The command that starts Gym, e.g. the ``ng_run`` of another virtual environment."""
    overrides: tuple[str, ...] = ()
    """More of its arguments, e.g. ``++skip_venv_if_present=true``."""
    folder: Path | None = None
    """Where it is started: its paths are relative to it. Unset: here."""
    variables: Variables = Field({})
    """Environment variables of its process, besides those of nemorl's."""
    gpu_nodes: int = Field(0, ge=0, le=100_000)
    """Nodes, beside those of the run, on whose GPUs Gym serves models of its own (``local_vllm_model``,
    ``genrm_model``), in the Ray cluster of ``cluster.address``. Gym is told where that is, and takes what it wants
    there. 0: none."""
    ready_s: float = Field(1800.0, gt=0)
    """Seconds until all servers must answer. Gym makes a virtual environment for each of them the first time."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if shutil.which(Path(self.command[0]).expanduser()) is None:
            what = f"there is no program {self.command[0]!r} here"
            yield ConfigIssue("command", what, "install NeMo-Gym, or give the path of its ng_run", here=True)
        if self.folder is not None and not self.folder.expanduser().is_dir():
            yield ConfigIssue("folder", f"{self.folder} is no folder", "give where Gym's configs are", here=True)


class NemoGymConfig(PlayedConfig):
    """Plays episodes on NeMo-Gym's agent servers, by their own ``/run``."""

    summary: ClassVar[str] = "episodes of NeMo-Gym's agent servers, which call the policy"
    requires_modules: ClassVar[tuple[str, ...]] = ("aiohttp",)
    install_hint: ClassVar[str] = 'pip install "nemorl-agents[nemo-gym]"'
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **OUTCOME_METRICS,
        "train/environment/environment_error": MetricInfo(
            "Servers away", "share", "share of episodes whose agent server did not answer", "anything above 0"
        ),
    }

    head_url: ServerURL = Field("http://127.0.0.1:11000", pattern=r"^https?://")
    """Gym's head server, which tells where its agents are."""
    plaintext: bool = False
    """Let these be other machines: Gym speaks ``http``, so what passes can be read and changed on its way."""
    agents: dict[str, Annotated[ServerURL, Field(pattern=r"^https?://")]] = Field({})
    """Addresses of agent servers by name, where no head server tells them."""
    agent: str | None = None
    """The agent that plays all rows. Unset: the one that a row's ``agent_ref`` names."""
    model_port: int | None = Field(None, ge=1, le=65535)
    """The port here where Gym calls the policy: it must be in Gym's ``policy_base_url``,
    ``http://127.0.0.1:PORT/v1``."""
    start: StartGymConfig | None = None
    """Starts Gym, and ends it. Unset: it runs already."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.start is None and self.model_port is None:
            what = "Gym that runs already calls the policy at an address that it was given"
            yield ConfigIssue(
                "model_port", what, "set it, and start Gym with +policy_base_url=http://127.0.0.1:PORT/v1"
            )
        addresses = {"head_url": self.head_url, **{f"agents.{name}": url for name, url in self.agents.items()}}
        for path, url in addresses.items():
            if not self.plaintext and (problem := plaintext_problem(url)) is not None:
                yield ConfigIssue(path, *problem)
        if self.start is not None and self.agents:
            yield ConfigIssue("agents", "Gym is started here and tells them itself", "set agents or start")

    def build(self) -> Environment:
        from nemorl_agents.interop.nemo_gym import NemoGym

        return NemoGym(self)


class NemoGymTasksConfig(DatasetConfig):
    """Files of NeMo-Gym: JSON Lines with ``responses_create_params``."""

    summary: ClassVar[str] = "NeMo-Gym's JSON Lines, for the environment nemo_gym"

    path: DatasetFile
    """Rows to train on."""
    validation_path: DatasetFile | None = None
    """Held-out rows. Unset: no validation split."""
    agent: str | None = None
    """Only rows whose ``agent_ref`` names this agent."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        for name, path in (("path", self.path), ("validation_path", self.validation_path)):
            if path is not None and not path.is_file():
                yield ConfigIssue(name, f"{path} does not exist", "correct the path", here=True)

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_agents.interop.gym_rows import rows

        path = {"train": self.path, "validation": self.validation_path}.get(split)
        return None if path is None else rows(path, agent=self.agent)
