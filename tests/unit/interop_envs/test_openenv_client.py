"""OpenEnv: a session per episode, against a real server in a thread of this process."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from nemorl.errors import DataError, UsageError
from nemorl.types import Prompt, Step
from nemorl_agents.interop import OpenEnvConfig
from nemorl_agents.interop.openenv import OpenEnv
from nemorl_rl.environments import EnvironmentPool
from pydantic import ValidationError
from recorded_messages import Raises
from scripted_policy import ScriptedPolicy

server: Any = pytest.importorskip("openenv.core.env_server", reason="openenv-core is not installed")
uvicorn: Any = pytest.importorskip("uvicorn", reason="uvicorn is not installed")


class Guess(server.Action):
    message: str


class Hint(server.Observation):
    message: str = ""


class Guessing(server.Environment):
    """Guess the number; the reward is 1 for the right one."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    opened = 0
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).opened += 1
        self.number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        self.number = seed or 0
        return Hint(message="guess")

    def step(self, action: Any, **_: Any) -> Any:
        guess = int(action.message)
        if guess == self.number:
            return Hint(message="right", reward=1.0, done=True)
        return Hint(message="higher" if guess < self.number else "lower", reward=-0.25)

    def close(self) -> None:
        type(self).closed += 1

    @property
    def state(self) -> Any:
        return server.State()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = server.create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=32)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not running.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join(10)


def pool(url: str, **options: Any) -> EnvironmentPool:
    return EnvironmentPool(OpenEnv(OpenEnvConfig(url=url, **options)), timeout_s=20)


def prompt(number: int) -> Prompt:
    return Prompt(0, "Guess.", (1,), row={"reset": {"seed": number}})


def wait_until(holds: Any) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(holds())


def test_a_conversation_goes_to_the_server_and_back(url: str) -> None:
    environments = pool(url)
    episode = environments.start(prompt(7))
    steps: list[Step] = [environments.step([episode], [guess])[0] for guess in ("3", "9", "7")]
    assert [step.observation for step in steps] == ["\nhigher\n", "\nlower\n", None]
    assert [step.score.reward for step in steps] == [-0.25, -0.25, 1.0]
    assert [step.done for step in steps] == [False, False, True]
    environments.close()


def test_every_episode_has_a_session_of_its_own(url: str) -> None:
    environments = pool(url)
    episodes = [environments.start(prompt(number)) for number in range(8)]
    steps = environments.step(episodes, ["4"] * 8)
    assert [step.observation for step in steps] == [
        "\nlower\n" if number < 4 else None if number == 4 else "\nhigher\n" for number in range(8)
    ]
    environments.close()


def test_sessions_of_episodes_that_nobody_continues_are_closed(url: str) -> None:
    environments = pool(url)
    episodes = [environments.start(prompt(1)) for _ in range(3)]
    environments.step(episodes, ["2", "3", "4"])
    before = Guessing.closed
    del episodes
    gc.collect()
    assert wait_until(lambda: Guessing.closed >= before + 3)
    environments.close()


def test_what_the_server_fails_at_earns_nothing_and_ends_its_episode_only(url: str) -> None:
    environments = pool(url)
    refused, taken = environments.step([environments.start(prompt(1)) for _ in range(2)], ["no number", "1"])
    assert (refused.score.reward, refused.done, dict(refused.score.metrics)) == (0.0, True, {"action_refused": 1.0})
    assert (taken.score.reward, dict(taken.score.metrics)) == (1.0, {"action_refused": 0.0})
    environments.close()


def test_a_server_that_takes_no_action_at_all_ends_the_run(url: str, raises: Raises) -> None:
    environments = pool(url, action={"massage": "{response}"})
    with raises(UsageError, 8, "environment.action", varies=r"(?<=last one: ).*"):
        environments.step([environments.start(prompt(1)) for _ in range(8)], ["2"] * 8)
    environments.close()


def test_a_field_that_the_observation_lacks_is_told(url: str) -> None:
    environments = pool(url, text_field="text")
    with pytest.raises(DataError, match="'text'"):
        environments.step([environments.start(prompt(1))], ["2"])
    environments.close()


def test_an_episode_whose_server_is_not_there_fails_without_a_verdict() -> None:
    environments = pool("http://127.0.0.1:9")
    [step] = environments.step([environments.start(prompt(1))], ["2"])
    environments.close()
    assert (step.done, step.score.valid, step.score.outcome) == (True, False, "infrastructure")
    assert "ConnectionError: Failed to connect to ws://127.0.0.1:9/ws" in step.score.cause


def try_out(url: str, **options: Any) -> None:
    environment = OpenEnv(OpenEnvConfig(url=url, **options))
    asyncio.run(environment.try_out(prompt(1), ScriptedPolicy()))


def test_a_server_is_tried_before_the_model_loads(url: str, raises: Raises) -> None:
    opened, closed = Guessing.opened, Guessing.closed
    try_out(url)
    try_out(url.replace("http", "ws"))
    assert wait_until(lambda: Guessing.closed - closed == Guessing.opened - opened >= 2)
    with raises(UsageError, "message", "massage"):
        try_out(url, action={"massage": "{response}"})
    with raises(UsageError, "text", "message"):
        try_out(url, text_field="text")
    with raises(UsageError, "http://127.0.0.1:9"):
        try_out("http://127.0.0.1:9")


def test_mistakes_in_the_options_are_told() -> None:
    for options, field in (
        ({"url": "localhost"}, "url"),
        ({"url": "https://x", "action": {"a": "b"}}, "action"),
        ({"url": "https://x", "turn_template": "b"}, "turn_template"),
    ):
        with pytest.raises(ValidationError) as caught:
            OpenEnvConfig(**options)  # type: ignore[arg-type]
        assert [error["loc"][0] for error in caught.value.errors()] == [field]
