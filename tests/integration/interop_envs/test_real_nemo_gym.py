"""NeMo-Gym itself, in an environment of its own, plays episodes of its counter against the gateway.

``make test-optional`` makes that environment and names it in ``NEMORL_NEMO_GYM``. Gym installs an environment for each
of its servers where it is started, with the ``uv`` beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.types import Prompt
from nemorl_agents.interop.episodes_config import NemoGymConfig, StartGymConfig
from nemorl_agents.interop.nemo_gym import NemoGym
from scripted_policy import LIMITS, Asked, ScriptedPolicy, calling, saying

HOME = os.environ.get("NEMORL_NEMO_GYM")
AGENT = "example_session_state_mgmt_simple_agent"
CONFIGS = (
    "resources_servers/example_session_state_mgmt/configs/example_session_state_mgmt.yaml",
    "responses_api_models/openai_model/configs/openai_model.yaml",
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.ray,
    pytest.mark.skipif(HOME is None, reason="NEMORL_NEMO_GYM names no environment with nemo-gym: make test-optional"),
]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "name": name, "description": "", "strict": True, "parameters": parameters}


def row(initial: int, expected: int) -> dict[str, Any]:
    """A task of Gym's example: the counter begins at ``initial`` and shall end at ``expected``."""
    tools = [tool("increment_counter", count={"type": "integer", "description": ""}), tool("get_counter_value")]
    request = {"input": [{"role": "user", "content": "add 1 then add 2 then get the count"}], "tools": tools}
    agent = {"type": "responses_api_agents", "name": AGENT}
    task = {"expected_count": expected, "initial_count": initial}
    return {"responses_create_params": request, "agent_ref": agent, **task}


def counts(asked: Asked) -> Any:
    """Adds 1, adds 2, reads the counter, and says what it read."""
    done = [message["content"] for message in asked.messages if message["role"] == "tool"]
    calls = [("increment_counter", '{"count": 1}'), ("increment_counter", '{"count": 2}'), ("get_counter_value", "{}")]
    if len(done) == len(calls):
        return saying(str(json.loads(done[-1])["count"]))
    call = calling(*calls[len(done)], call_id=f"call_{len(done)}")
    return saying(None, sampled="call", tool_calls=[call], finish_reason="tool_calls")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NemoGym]:
    programs = Path(HOME or "") / "bin"
    interpreters = (programs / "python").resolve().parent  # uv takes none out of an environment
    start = StartGymConfig(
        command=(str(programs / "ng_run"),),
        config_paths=CONFIGS,
        folder=tmp_path_factory.mktemp("gym"),
        variables={"PATH": f"{programs}:{interpreters}:{os.environ['PATH']}"},
        ready_s=1500,
    )
    found = NemoGym(NemoGymConfig(start=start, timeout_s=300))
    yield found
    found.close()


def test_the_real_gym_plays_an_episode_for_each_row_and_tells_their_counters_apart(environment: NemoGym) -> None:
    async def play(rows: list[dict[str, Any]], policies: list[ScriptedPolicy]) -> Any:
        prompts = [Prompt(0, "count", (1,), row={"nemo_gym": task}) for task in rows]
        return await asyncio.gather(*map(environment.rollout, prompts, policies))

    # 3 + 1 + 2 is 6, 6 + 1 + 2 is 9 and not 15.
    policies = [ScriptedPolicy(counts, limits=replace(LIMITS, timeout_s=300)) for _ in range(3)]
    scores = asyncio.run(play([row(3, 6), row(6, 15), row(6, 9)], policies))
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
    assert {score.metrics["outcome_finished"] for score in scores} == {1.0}
    assert {score.metrics["gateway_requests"] for score in scores} == {4.0}
    assert [policy.asked[-1].messages[-1]["role"] for policy in policies] == ["tool"] * 3
    assert [json.loads(policy.asked[-1].messages[-1]["content"]) for policy in policies] == [
        {"count": 6},
        {"count": 9},
        {"count": 9},
    ]
