"""verifiers 0.4 from the package index, in a virtual environment of its own, plays episodes against the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import UsageError
from nemorl.types import Prompt, Score
from nemorl_agents.interop.episodes_config import VerifiersEnvConfig, VerifiersEnvTasksConfig
from nemorl_agents.interop.verifiers_env import VerifiersEnv
from nemorl_rl.agents.contract import CallLimitError
from peer_venvs import peer_python
from scripted_policy import LIMITS, Asked, ScriptedPolicy, calling, saying

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Where verifiers is."""
    given = peer_python(tmp_path_factory.mktemp("verifiers"), "verifiers==0.4.0", "uv")
    return {"taskset": "nemorl-toy-counter", "python": given, "variables": {"PYTHONPATH": str(HERE)}}


@pytest.fixture
def environment(common: dict[str, Any]) -> Iterator[VerifiersEnv]:
    found = VerifiersEnv(VerifiersEnvConfig(**common, env={"agent": AGENT}, timeout_s=300))
    yield found
    found.close()


def count(asked: Asked) -> Any:
    """Adds one, twice, and stops."""
    done = sum(message["role"] == "tool" for message in asked.messages)
    if done == 2:
        return saying("done")
    call = calling("add", '{"amount": 1}', call_id=f"call_{done}")
    return saying(None, sampled="add", tool_calls=[call], finish_reason="tool_calls")


def play(environment: VerifiersEnv, rows: Any, policies: list[ScriptedPolicy]) -> list[Score]:
    async def all_of_them() -> list[Score]:
        prompts = [Prompt(0, "count", (1,), row=row) for row in rows]
        return await asyncio.gather(*map(environment.rollout, prompts, policies))

    return asyncio.run(all_of_them())


def test_a_stateful_tool_and_several_turns(common: dict[str, Any], environment: VerifiersEnv) -> None:
    rows = VerifiersEnvTasksConfig(**common, num_validation=1).build("train")
    assert rows is not None
    assert [row["verifiers_task"]["wanted"] for row in rows] == [3, 4]
    held_out = VerifiersEnvTasksConfig(**common, num_validation=1).build("validation")
    policies = [ScriptedPolicy(count, limits=replace(LIMITS, timeout_s=300)) for _ in range(3)]
    scores = play(environment, [*(held_out or ()), *rows], policies)
    # Two times one is 2: right for the first task alone, and weighted by 2.
    assert [score.reward for score in scores] == [2.0, 0.0, 0.0]
    assert {(score.metrics["turns"], score.metrics["length"]) for score in scores} == {(3.0, 4.0)}
    for policy in policies:
        assert [message["content"] for message in policy.asked[-1].messages if message["role"] == "tool"] == ["1", "2"]
        assert [tool["function"]["name"] for tool in policy.asked[0].tools] == ["add"]


def test_what_goes_wrong_over_there_is_an_outcome(common: dict[str, Any], environment: VerifiersEnv) -> None:
    rows = VerifiersEnvTasksConfig(**common, options={"first": -1, "tasks": 1}).build("train")
    limits = replace(LIMITS, timeout_s=300)

    def refuses(_: Asked) -> Any:
        raise CallLimitError("no more", fix="call less often")

    crashed, stopped = play(
        environment, [*(rows or ())] * 2, [ScriptedPolicy(count, limits=limits), ScriptedPolicy(refuses, limits=limits)]
    )
    assert crashed.metrics["outcome_crashed"] == 1.0
    assert stopped.metrics["outcome_stopped"] == 1.0


def test_a_trial_episode_is_played_and_tells_of_a_harness_that_is_none(
    common: dict[str, Any], environment: VerifiersEnv
) -> None:
    rows = VerifiersEnvTasksConfig(**common).build("train")
    assert rows is not None
    prompt, policy = Prompt(0, "count", (1,), row=rows[0]), ScriptedPolicy(count)
    asyncio.run(environment.try_out(prompt, policy))
    assert policy.asked[0].tools
    broken = VerifiersEnv(VerifiersEnvConfig(**common, env={"agent": {**AGENT, "harness": {"id": "no-such"}}}))
    with pytest.raises(UsageError, match="no-such") as caught:
        asyncio.run(broken.try_out(prompt, policy))
    assert str(caught.value).count("fix:") == 1
