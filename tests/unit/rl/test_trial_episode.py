"""The trial episode: what an environment needs is found missing before the model is loaded."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from chat_models import tokenizer_of
from nemorl.config.load import load_config
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError, DeadlineError, NemorlError, UsageError
from nemorl.types import Prompt
from nemorl_cli.console import Console
from nemorl_rl.agents.contract import CallLimitError
from nemorl_rl.agents.trial import ANSWER, CALLS, try_out
from nemorl_rl.environments import WeightedEnvironment
from nemorl_testing.models import tiny_model
from recorded_messages import Raises

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CALLS_TOO = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}\n</tool_call>{% endfor %}'
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN.replace(
    "{{ m.content }}", "{{ m.content }}" + CALLS_TOO
)
ROW = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


class Agent(Environment):
    """Its trial calls the policy as its episodes do."""

    name = "toy"

    def __init__(self, *, calls: int = 1, tools: Any = (), hides: bool = False) -> None:
        self.calls, self.tools, self.hides = calls, tools, hides
        self.said: list[str] = []

    async def try_out(self, prompt: Prompt, policy: Any) -> None:
        try:
            for _ in range(self.calls):
                reply = await policy.chat([{"role": "user", "content": prompt.text}], tools=self.tools)
                self.said.append(reply.text)
        except NemorlError as error:
            if self.hides:  # as a harness in another process does, which gets an HTTP error
                raise UsageError("it got no answer") from None
            raise error


def run(folder: Path, **changes: Any) -> Any:
    given = {"algorithm": "grpo", "model": str(tiny_model()), "data": "arithmetic", "max_steps": 1}
    return load_config({**given, "run_dir": str(folder / "run"), **changes})


def test_the_trial_policy_answers_a_call_or_two() -> None:
    environment = Agent(calls=CALLS)
    try_out(environment, ROW, tokenizer_of(PLAIN), None)
    assert environment.said == [ANSWER] * CALLS
    with pytest.raises(CallLimitError):
        try_out(Agent(calls=CALLS + 1), ROW, tokenizer_of(PLAIN), None)


@pytest.mark.parametrize("hides", [False, True])
def test_tools_that_the_template_does_not_show_are_told_whatever_the_agent_makes_of_it(hides: bool) -> None:
    try_out(Agent(tools=[TOOL], hides=hides), ROW, tokenizer_of(WITH_TOOLS), None)
    with pytest.raises(DataError, match="tools"):
        try_out(Agent(tools=[TOOL], hides=hides), ROW, tokenizer_of(PLAIN), None)


def test_without_a_row_nothing_is_tried() -> None:
    environment = Agent()
    try_out(environment, None, tokenizer_of(PLAIN), None)
    assert environment.said == []


def test_each_part_of_several_environments_is_tried() -> None:
    one, other = Agent(), Agent()
    try_out(WeightedEnvironment({"one": one, "other": other}), ROW, tokenizer_of(PLAIN), None)
    assert one.said == other.said == [ANSWER]


def test_an_error_of_a_trial_names_the_environment(raises: Raises) -> None:
    class Broken(Agent):
        async def try_out(self, prompt: Prompt, policy: Any) -> None:
            await asyncio.sleep(0)
            raise ValueError("no server")

    with raises(NemorlError, "toy", "server"):
        try_out(Broken(), ROW, tokenizer_of(PLAIN), None)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_trial_that_never_ends_is_given_up(blocks: bool, tmp_path: Path, raises: Raises) -> None:
    class Silent(Environment):
        name = "toy"

        def score(self, prompt: Prompt, response: str) -> float:
            return 1.0

        async def try_out(self, prompt: Prompt, policy: Any) -> None:
            if blocks:
                time.sleep(3)
            await asyncio.sleep(3600)

    with raises(DeadlineError, "toy", "0.5"):
        run(tmp_path, plugins={"build_timeout_s": 0.5}).build().fit(reward_fn=Silent(), console=Console(quiet=True))


def test_a_run_whose_environment_cannot_begin_ends_before_its_model_is_loaded(tmp_path: Path, raises: Raises) -> None:
    class NoServer(Environment):
        name = "toy"

        def score(self, prompt: Prompt, response: str) -> float:
            raise AssertionError("the run has begun")

        async def try_out(self, prompt: Prompt, policy: Any) -> None:
            raise UsageError(f"no server for {prompt.answer}", fix="start it")

    with raises(UsageError, "server"):
        run(tmp_path).build().fit(reward_fn=NoServer(), console=Console(quiet=True))
    assert not [*tmp_path.rglob("*.safetensors")]
