"""The environment ``agent`` around a tiny gateway and programs of a few lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_world import ASK, Programs, Script, TinyGateway
from nemorl_agents.programs import AgentConfig
from nemorl_agents.programs.build import environment_of
from nemorl_agents.programs.environment import Agent


@pytest.fixture
def gateway() -> Iterator[TinyGateway]:
    found = TinyGateway()
    yield found
    found.shutdown()


@pytest.fixture(autouse=True)
def _has_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl_agents.programs.config.gateway_is_installed", lambda: True)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a program that may ``ask`` the policy."""

    def write(source: str, name: str = "agent.py") -> Path:
        path = tmp_path / name
        path.write_text(ASK + textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def program(gateway: TinyGateway, tmp_path: Path) -> Programs:
    """The environment of a script."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def says_42(prompt, response):\n    return float(response == '42')\n")

    def build(script: Path, *arguments: str, **options: Any) -> Agent:
        options = {"reward": f"{rewards}:says_42", **options}
        config = AgentConfig(command=("python", "-S", str(script), *arguments), **options)
        environment = environment_of(config, lambda: gateway)
        assert isinstance(environment, Agent)
        return environment

    return build
