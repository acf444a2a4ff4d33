"""``environment.gateway`` and rewards, with the clients that agents use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from nemorl.config.load import validate
from nemorl.errors import ConfigError
from nemorl_agents.gateway.gateway import Gateway, GatewayOptions
from nemorl_rl.agents.gateways import GatewayConfig, GatewayRules, start_gateway
from scripted_policy import ScriptedPolicy

ASK: Any = {"messages": [{"role": "user", "content": "?"}]}


@pytest.fixture
def hard_coded() -> Iterator[Any]:
    """A gateway for agents that name one model and send what nobody serves."""
    rules = GatewayConfig(models=("gpt-4o-mini", "claude-*"), ignored_fields=("logit_bias",)).rules
    with start_gateway(rules) as found:  # type: ignore[attr-defined]
        yield found


def test_a_client_that_hard_codes_its_model_gets_by_and_another_is_told_the_names(hard_coded: Any) -> None:
    access = hard_coded.open(ScriptedPolicy())
    assert access.model == "gpt-4o-mini"
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
    for name in ("gpt-4o-mini", "claude-x", "policy"):
        answer = client.chat.completions.create(model=name, logit_bias={"1": 2}, **ASK)
        assert (answer.model, answer.choices[0].message.content) == (name, "4")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", **ASK)
    assert "gpt-4o-mini, claude-*, policy (environment.gateway.models)" in str(caught.value)
    assert [one.id for one in client.models.list()] == ["gpt-4o-mini", "policy"]


@pytest.mark.parametrize(("models", "named"), [(("*",), "policy"), (("gpt-*", "own"), "own"), (("gpt-*",), "policy")])
def test_a_program_is_told_a_name_that_is_answered(models: tuple[str, ...], named: str) -> None:
    options = GatewayOptions.of(GatewayRules(models))
    assert options.model == named
    assert options.answers(named)


def test_the_longest_body_is_the_configs() -> None:
    assert GatewayOptions.of(GatewayConfig().rules).max_body_bytes == 33_554_432
    assert GatewayOptions.of(GatewayConfig(max_body_mib=3).rules).max_body_bytes == 3_145_728


def test_no_name_at_all_is_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match="models"):
        validate(GatewayConfig, {"models": []}, source="test")


def test_the_sdks_give_rewards(gateway: Gateway) -> None:
    policy = ScriptedPolicy()
    access = gateway.open(policy)
    mine = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
    first = mine.chat.completions.create(model="policy", **ASK)
    told: Any = mine.post("/reward", body={"reward": 0.5, "response_id": first.id}, cast_to=dict[str, Any])
    assert told == {"object": "reward", "response_id": first.id, "index": 0, "reward": 0.5, "total": 0.5}
    theirs = anthropic.Anthropic(base_url=access.base_url, api_key=access.api_key)
    second = theirs.messages.create(model="policy", max_tokens=5, **ASK)
    told = theirs.post("/v1/reward", body={"reward": 1}, cast_to=dict[str, Any])
    assert (told["response_id"], told["total"]) == (second.id, 1.0)
    traffic = gateway.close(access)
    with pytest.raises(openai.ConflictError):
        mine.post("/reward", body={"reward": 1}, cast_to=dict[str, Any])
    assert traffic.metrics()["gateway_rewards"] == 2.0
    assert [value for _, value in policy.rewards] == [0.5, 1.0]


PROGRAM = """
import os, urllib.request, json
def post(path, **body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))
asked = {"messages": [{"role": "user", "content": "?"}]}
for turn in range(3):
    answer = post("/chat/completions", model="gpt-4o-mini", **asked)
    if turn != 1:
        post("/reward", reward=turn + 0.5)
print("42")
"""


def test_a_program_rewards_its_turns_through_the_environments_own_gateway(tmp_path: Path) -> None:
    import asyncio

    from nemorl.types import Prompt
    from nemorl_agents.programs import AgentConfig
    from nemorl_agents.programs.build import environment_of

    (tmp_path / "agent.py").write_text(PROGRAM)
    config = AgentConfig.model_validate(
        {
            "command": [sys.executable, str(tmp_path / "agent.py")],
            "reward": "exact_match",
            "gateway": {"models": ["gpt-4o-mini"]},
        }
    )
    environment = environment_of(config)
    policy = ScriptedPolicy()
    try:
        score = asyncio.run(environment.rollout(Prompt(0, "?", (5,), answer="42"), policy))
    finally:
        environment.close()
    assert (score.reward, score.metrics["gateway_rewards"]) == (1.0, 2.0)  # type: ignore[union-attr]
    assert [value for _, value in policy.rewards] == [0.5, 2.5]
