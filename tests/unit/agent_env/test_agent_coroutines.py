"""Coroutines and the built-in loop: what they are given, what they return, and how they end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import nemorl
import pytest
from agent_world import ScriptedPolicy, play, wants
from nemorl.errors import BackendError, ConfigError, UsageError
from nemorl.types import Prompt
from nemorl_agents.programs import AgentConfig
from nemorl_agents.programs.build import agent_environment
from nemorl_agents.programs.tools import Toolbox, function_tool
from nemorl_rl.agents.contract import ContextOverflowError, EpisodePolicy
from nemorl_rl.agents.seats import Seated, SeatScores, seat_scores
from recorded_messages import Raises
from scripted_policy import ScriptedPolicy as Scripted

TOOLS = '''
import asyncio
from dataclasses import dataclass

LOG = []

def add(a: int, b: int = 1) -> int:
    """The sum of a and b."""
    LOG.append((a, b))
    return a + b

async def look(key: str) -> dict:
    "Looks something up."
    await asyncio.sleep(0)
    return {"key": key}

def broken(x: float) -> float:
    return 1 / x

async def slow() -> str:
    await asyncio.sleep(600)

async def rollout(prompt, policy, tools):
    first = await policy.chat([{"role": "user", "content": prompt.text}], tools=tools.specs)
    [told] = await tools.messages(first.message["tool_calls"])
    return told["content"]

async def scored(prompt, policy):
    await policy.chat([{"role": "user", "content": prompt.text}])
    return {"correct": 1.0, "short": 0.5}

def says_42(prompt, response):
    return float(response == "42")
'''


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return str(path)


def loop(tools: str, *functions: str, **options: Any) -> Any:
    given = {"functions": [f"{tools}:{name}" for name in functions], **options.pop("tools", {})}
    return AgentConfig(tools=given, reward=f"{tools}:says_42", **options).build()


# The built-in loop


def test_the_loop_answers_tool_calls_until_a_message_has_none(tools: str) -> None:
    agent = loop(tools, "add", system="Use tools.")
    policy = ScriptedPolicy(wants("add", a=40, b=2), "42")
    score = play(agent, policy)
    assert (score.reward, score.metrics["tool_calls"], score.metrics["tool_errors"]) == (1.0, 1.0, 0.0)
    first, second = policy.heard
    assert first == [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "6*7="}]
    assert second[:2] == first
    assert second[2]["tool_calls"][0]["id"] == "call_1"
    assert second[3] == {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    [told] = policy.tools
    assert told == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of a and b.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"title": "A", "type": "integer"},
                    "b": {"default": 1, "title": "B", "type": "integer"},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("add", '{"a": 1}', "2"),
        ("add", '{"a": "4"}', "5"),
        ("add", '{"a": "x"}', "error: wrong arguments of add: a: Input should be a valid integer"),
        ("add", '{"a": 1, "c": 2}', "error: wrong arguments of add: c: Extra inputs are not permitted"),
        ("add", "{", "error: the arguments of add are no JSON"),
        ("add", "[1]", "error: the arguments of add are no JSON object"),
        ("ad", "{}", "error: there is no tool 'ad'. Did you mean 'add'?"),
        ("broken", '{"x": 0}', "error: ZeroDivisionError: float division by zero"),
        ("look", '{"key": "k"}', '{"key": "k"}'),
        ("slow", "", "error: slow took longer than 0.2 seconds"),
    ],
)
def test_whatever_a_model_asks_of_a_tool_it_gets_an_answer(tools: str, name: str, arguments: str, told: str) -> None:
    from nemorl_rl.environments.references import load_function

    functions = [load_function(f"{tools}:{one}") for one in ("add", "look", "broken", "slow")]
    box = Toolbox(map(function_tool, functions), timeout_s=0.2)
    assert asyncio.run(box.call(name, arguments)).startswith(told)
    assert (box.calls, box.errors) == (1, int(told.startswith("error")))


def test_a_tools_own_time_out_is_told_as_its_own() -> None:
    def ask() -> str:
        raise TimeoutError("the database")

    box = Toolbox([function_tool(ask)], timeout_s=60.0)
    assert asyncio.run(box.call("ask", "{}")) == "error: TimeoutError: the database"


def test_long_results_are_cut(tools: str) -> None:
    def long() -> str:
        return "x" * 30

    box = Toolbox([function_tool(long)], max_result_chars=10)
    assert asyncio.run(box.call("long", "{}")) == "x" * 10 + "… (20 more characters)"


def test_a_system_message_of_the_row_is_kept(tools: str) -> None:
    policy = ScriptedPolicy("42")
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7="})
    play(loop(tools, system="Use tools."), policy, Prompt(0, "6*7=", (5,), messages=messages))
    assert policy.heard == [[*messages]]


# Coroutines of a user


def test_a_coroutine_of_a_file_may_ask_for_tools_and_returns_its_answer(tools: str) -> None:
    agent = loop(tools, "add", rollout=f"{tools}:rollout")
    assert play(agent, ScriptedPolicy(wants("add", a=41))).reward == 1.0


def test_a_coroutine_may_score_itself(tools: str) -> None:
    score = play(AgentConfig(rollout=f"{tools}:scored").build(), ScriptedPolicy("x"))
    assert (score.reward, score.correct, dict(score.components)) == (1.5, True, {"correct": 1.0, "short": 0.5})
    assert score.metrics["outcome_finished"] == 1.0


def test_a_function_of_python_code_is_an_environment() -> None:
    async def ask(prompt: Prompt, policy: EpisodePolicy) -> None:
        await policy.chat([{"role": "user", "content": prompt.text}])

    agent = nemorl.agent_environment(ask, lambda prompt, response: float(response == "42"))
    assert play(agent, ScriptedPolicy("42")).reward == 1.0


def agent_that(does: Any, **options: Any) -> Any:
    async def rollout(prompt: Prompt, policy: EpisodePolicy) -> Any:
        await policy.chat([{"role": "user", "content": prompt.text}])
        return await does()

    return agent_environment(rollout, **options)


async def duel(prompt: Prompt, policy: EpisodePolicy) -> Any:
    for name in ("white", "black"):
        await Seated(policy, name).chat([{"role": "user", "content": name}])
    return seat_scores({"white": 1.0, "black": -0.5})


@pytest.mark.parametrize(
    ("seats", "reward", "trained", "scored"),
    [
        ({}, 0.25, [True, True], {"white": 1.0, "black": -0.5}),
        ({"black": "untrained"}, 1.0, [True, False], {"white": 1.0}),
    ],
)
def test_a_coroutine_may_play_several_seats(
    seats: dict[str, str], reward: float, trained: list[bool], scored: dict[str, float]
) -> None:
    policy = Scripted()
    score = asyncio.run(agent_environment(duel, seats=seats).rollout(Prompt(0, "", (1,)), policy))
    assert isinstance(score, SeatScores)
    assert (score.reward, {seat: one.reward for seat, one in score.seats.items()}) == (reward, scored)
    assert score.metrics["outcome_finished"] == 1.0
    assert [(asked.options.seat, asked.options.is_trained) for asked in policy.asked] == [
        *zip(("white", "black"), trained, strict=True)
    ]


def test_a_seat_that_no_engine_can_play_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)seats\.black.*snapshots"):
        agent_environment(duel, seats={"black": "frozen"})


def test_coroutines_end_in_the_same_ways() -> None:
    async def fails() -> None:
        raise KeyError("tool")

    async def sleeps() -> None:
        await asyncio.sleep(600)

    async def is_cut() -> None:
        raise ContextOverflowError(70, 64)

    async def waits_in_vain() -> None:
        raise TimeoutError("the database")

    for does, outcome in ((fails, "crashed"), (sleeps, "timeout"), (is_cut, "stopped"), (waits_in_vain, "crashed")):
        score = play(agent_that(does, timeout_s=0.5), ScriptedPolicy("x"))
        assert (score.reward, score.metrics[f"outcome_{outcome}"]) == (0.0, 1.0), outcome

    async def idles(prompt: Prompt, policy: EpisodePolicy) -> float:
        return 1.0

    score = play(agent_environment(idles), ScriptedPolicy())
    assert (score.reward, score.metrics["outcome_no_calls"]) == (0.0, 1.0)


def test_what_a_crash_says_is_in_the_error(raises: Raises) -> None:
    async def fails() -> None:
        raise KeyError("tool")

    with raises(UsageError, "KeyError", "crashed"):
        play(agent_that(fails, outcomes={"crashed": "error"}), ScriptedPolicy("x"))

    async def at_once(prompt: Prompt, policy: EpisodePolicy) -> float:
        raise KeyError("row_key")

    agent = agent_environment(at_once, give_up_after=2)
    play(agent, ScriptedPolicy())
    with raises(UsageError, "row_key", 2):
        play(agent, ScriptedPolicy())


def test_an_engine_that_fails_ends_the_run(raises: Raises) -> None:
    async def never() -> None: ...

    with raises(BackendError, "engine"):
        play(agent_that(never), ScriptedPolicy(BackendError("the engine is gone")))


def test_a_coroutine_that_leaves_its_score_to_nobody_is_an_error(raises: Raises) -> None:
    async def says_nothing() -> None: ...

    with raises(UsageError, "coroutine", "reward"):
        play(agent_that(says_nothing), ScriptedPolicy("x"))


def test_what_is_no_coroutine_is_refused(raises: Raises) -> None:
    async def short(prompt: Prompt) -> float:
        return 1.0

    with raises(UsageError, "async"):
        agent_environment(lambda prompt, policy: 1.0)  # type: ignore[arg-type, return-value]
    with raises(UsageError, "short", 1):
        agent_environment(short)


# Configs


@pytest.mark.parametrize(
    ("options", "path", "facts"),
    [
        ({}, "reward", ["rewards.py:correct"]),
        ({"reward": "exact_match", "outcomes": {"crash": 0.0}}, "outcomes.crash", ["crashed"]),
        ({"reward": "exact_match", "rollout": "json:loads", "command": ["python"]}, "rollout", ["program"]),
        ({"reward": "exact_match", "answer": "stdout"}, "answer", ["last_message"]),
        ({"reward": "exact_match", "command": ["python", "{row[answer]}"]}, "hidden_columns", ["answer"]),
        ({"reward": "exact_match", "command": ["no-such-program"]}, "command", ["no-such-program"]),
        ({"reward": "exact_match", "command": ["python", "no_such.py"]}, "command", ["no_such.py"]),
        ({"reward": "exact_match", "sandbox": True}, "sandbox", ["command"]),
        ({"reward": "{tools}:says_4"}, "reward", ["says_42"]),
        ({"reward": "{tools}:says_42", "tools": {"functions": ["{tools}:ad"]}}, "tools.functions.0", ["add"]),
        ({"reward": "exact_match", "tools": {"mcp": [{}]}}, "tools.mcp.0", ["url"]),
        ({"reward": "exact_matc"}, "reward", ["exact_match"]),
    ],
)
def test_mistakes_in_a_config_are_named(
    tools: str, options: dict[str, Any], path: str, facts: list[str], raises: Raises
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(one) for key, one in value.items()}
        if isinstance(value, list):
            return [filled(one) for one in value]
        return value.replace("{tools}", tools) if isinstance(value, str) else value

    environment = {"name": "agent", **filled(options)}
    with raises(ConfigError, *facts, path=f"environment.{path}"):
        nemorl.load_config({"algorithm": "grpo", "model": "m", "data": "arithmetic", "environment": environment})


def test_a_config_loads_again_to_the_same(tools: str) -> None:
    reward = {"name": "exact_match", "ignore_case": True, "contains": False}
    function = {"name": "function", "function": f"{tools}:says_42"}
    for scored, meant in ((f"{tools}:says_42", function), (reward, reward)):
        config = AgentConfig(reward=scored, tools={"functions": [f"{tools}:add"]}, outcomes={"timeout": None})
        dumped = config.model_dump(mode="json")
        assert dumped["reward"] == meant
        assert AgentConfig(**dumped) == config


def test_a_config_without_a_reward_loads_again_too(tools: str) -> None:
    config = AgentConfig(rollout=f"{tools}:scored")
    assert AgentConfig(**config.model_dump(mode="json")) == config


def test_an_environment_that_talks_is_no_reward(raises: Raises) -> None:
    with raises(UsageError, "sliding_puzzle"):
        AgentConfig(reward="sliding_puzzle").build()


def test_the_rewards_of_a_file_are_tried_before_the_run(tools: str) -> None:
    [reward] = AgentConfig(reward=f"{tools}:says_42").build().rehearsals()
    assert reward.name == "says_42"
