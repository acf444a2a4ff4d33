"""verifiers: a taskset defined here, as a package that is installed nowhere but in ``sys.modules``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from nemorl.errors import DataError, PluginError, UsageError
from nemorl.types import Prompt, Score
from nemorl_agents.interop import VerifiersTasksConfig
from nemorl_rl.environments import EnvironmentPool

vf: Any = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

from nemorl_agents.interop.verifiers import Verifiers  # noqa: E402

SOURCE = """
import verifiers.v1 as vf

class EchoData(vf.TaskData):
    wanted: str

class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=2.0)
    async def says_it(self, trace) -> float:
        return float(self.data.wanted in trace.last_reply)

    @vf.reward(weight=0.5)
    async def is_short(self, trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class BoxTask(vf.Task[EchoData]):
    @vf.reward
    async def looks(self, trace, runtime) -> float:
        return 1.0

class EchoConfig(vf.TasksetConfig):
    count: int = 4

class Echo(vf.Taskset[EchoTask, EchoConfig]):
    def load(self):
        for number in range(self.config.count):
            data = EchoData(prompt=f"Say {number}.", system_prompt="Obey.", wanted=str(number))
            yield EchoTask(data, self.config.task)

class Box(vf.Taskset[BoxTask, vf.TasksetConfig]):
    def load(self):
        yield BoxTask(EchoData(prompt="Look.", wanted="x"))

class Endless(vf.Taskset[EchoTask, EchoConfig]):
    INFINITE = True
    def load(self):
        while True:
            yield EchoTask(EchoData(prompt="Say x.", wanted="x"))
"""


@pytest.fixture(autouse=True)
def _toy_tasksets() -> Iterator[None]:
    for name, exported in (("nemorl_toy_echo", "Echo"), ("nemorl_toy_box", "Box"), ("nemorl_toy_endless", "Endless")):
        module = ModuleType(name)
        sys.modules[name] = module
        exec(SOURCE, module.__dict__)
        module.__all__ = [exported]  # type: ignore[attr-defined]
        module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(name, None)
    yield
    for name in ("nemorl_toy_echo", "nemorl_toy_box", "nemorl_toy_endless"):
        del sys.modules[name]


def rows(taskset: str = "nemorl-toy-echo", split: str = "train", **options: Any) -> list[Any]:
    made = VerifiersTasksConfig(taskset=taskset, **options).build(split)
    return [json.loads(json.dumps(row)) for row in made or []]


def scores(row: Any, *responses: str, taskset: str = "nemorl-toy-echo") -> list[Score]:
    pool = EnvironmentPool(Verifiers(taskset, {}))
    prompt = Prompt(0, "say", (1,), row=row)
    return [step.score for step in pool.step([pool.start(prompt) for _ in responses], responses)]


def test_tasks_become_chat_rows() -> None:
    made = rows(options={"count": 3})
    assert [row["prompt"] for row in made][2] == [
        {"role": "system", "content": "Obey."},
        {"role": "user", "content": "Say 2."},
    ]
    assert len(made) == 3


def test_held_out_tasks_are_the_first() -> None:
    validation, train = (rows(split=split, num_validation=1) for split in ("validation", "train"))
    assert [len(validation), len(train)] == [1, 3]
    assert validation[0]["prompt"][1]["content"] == "Say 0."


def test_rewards_are_weighted_as_the_taskset_says() -> None:
    both, long, wrong = scores(rows()[3], "3", "I would say 3 now", "no")
    # 2 * says_it + 0.5 * is_short
    assert [score.reward for score in (both, long, wrong)] == [2.5, 2.0, 0.5]
    assert dict(long.components) == {"says_it": 1.0, "is_short": 0.0}
    assert dict(both.metrics) == {"length": 1.0}


def test_tasks_that_need_a_container_are_refused_rather_than_scored_zero() -> None:
    with pytest.raises(UsageError, match="BoxTask"):
        rows("nemorl-toy-box")


def test_mistakes_are_told() -> None:
    with pytest.raises(PluginError, match="nemorl-toy-none"):
        rows("nemorl-toy-none")
    with pytest.raises(UsageError):
        rows("nemorl-toy-endless")
    assert len(rows("nemorl-toy-endless", max_rows=2)) == 2
    with pytest.raises(DataError):
        scores({}, "x")
