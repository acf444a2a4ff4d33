"""Programs with the clients of OpenAI and Anthropic, unmodified, through the gateway of nemorl-agents."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from agent_world import ScriptedPolicy, play, prompt_of
from nemorl_agents.programs import AgentConfig
from nemorl_agents.programs.build import environment_of
from nemorl_agents.programs.environment import Agent
from test_agent_sandbox import NO_LANDLOCK, landlock_version
from tiers import only

pytestmark = pytest.mark.slow

CLIENTS = {
    "openai": """
import os, sys
from openai import OpenAI
messages = [{"role": "user", "content": sys.stdin.read()}]
reply = OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
print(reply.choices[0].message.content)
""",
    "anthropic": """
import os, sys
from anthropic import Anthropic
messages = [{"role": "user", "content": sys.stdin.read()}]
reply = Anthropic().messages.create(model=os.environ["ANTHROPIC_MODEL"], max_tokens=64, messages=messages)
print(reply.content[0].text)
""",
}


@pytest.mark.parametrize("sandbox", only(True, of=(False, True)))
@pytest.mark.parametrize("client", CLIENTS)
def test_an_unmodified_client_finds_the_policy(client: str, sandbox: bool, tmp_path: Path) -> None:
    package = pytest.importorskip(client)
    gateway = pytest.importorskip("nemorl_agents.gateway.gateway", reason="nemorl-agents is not installed")
    if sandbox and landlock_version() < 6:
        pytest.skip(NO_LANDLOCK)
    path = tmp_path / "agent.py"
    path.write_text(CLIENTS[client])
    packages = {
        Path(found.__file__ or "").resolve().parents[1] for found in (package, importlib.import_module("httpx"))
    }
    config = AgentConfig(command=("python", str(path)), reward="exact_match", sandbox=sandbox, readable=(*packages,))
    agent = environment_of(config, gateway.Gateway)
    assert isinstance(agent, Agent)
    policy = ScriptedPolicy("42")
    score = play(agent, policy, prompt_of("6*7=", answer="42"))
    agent.close()
    assert (score.reward, score.metrics["outcome_finished"], score.metrics["gateway_requests"]) == (1.0, 1.0, 1.0)
    assert [message["content"] for message in policy.heard[0]] == ["6*7="]
