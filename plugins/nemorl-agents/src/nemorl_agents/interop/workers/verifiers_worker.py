"""Plays episodes of one environment of verifiers, in an interpreter that has verifiers and need not have nemorl.

A script: ``python verifiers_worker.py FRONT_DOOR``, the file of :mod:`nemorl_trust.front_door`, reads one JSON object
per line from standard input, and writes one per answer to what was its standard output; all else that is printed goes
to standard error. It ends when standard input does. Imports verifiers (0.4, its ``v1`` API; 0.1 and 0.2 for classic
environments), aiohttp and the standard library.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from classic_verifiers import ClassicPlayer, is_classic
from relay import Relay, Route

MODEL = "policy"
SHOWN = 2000
"""Characters of an error."""


class ToldError(Exception):
    """An error that the user of the worker is to mend, as told."""


class Player:
    """One environment of verifiers, being served."""

    def __init__(self, env: Any) -> None:
        self._env = env
        doors = _module_of(sys.argv[1])
        self._relay = Relay(MODEL, doors.FrontDoor("the relay of model calls", doors.Limits()))
        self._stack = AsyncExitStack()
        self._starting: asyncio.Task[None] | None = None

    async def tasks(self, limit: int | None) -> list[dict[str, Any]]:
        """Tasks, from the first: prompt and data."""
        taskset = self._env.taskset
        if limit is None and not taskset.bounded:
            raise ToldError("the taskset has no end: set data.max_rows")
        return [_row(task) for task in islice(iter(taskset), limit)]

    async def run(self, task: Any, base_url: str, api_key: str) -> dict[str, Any]:
        """One episode, its model calls answered at ``base_url``."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        await self._served()
        task_type = type(self._env.taskset).task_type()
        played = task_type(task_type.data_type().model_validate(task), self._env.taskset.config.task)
        # One client for all episodes, since verifiers keeps every client that it ever made.
        context = ModelContext(model=MODEL, client=EvalClientConfig(base_url=self._relay.base_url, api_key_var="-"))
        seats: dict[str, str] = {}

        def minted(trace: Any) -> None:
            seats[trace.id] = _seat(trace.agent.name, seats.values())
            self._relay.routes[trace.id] = Route(base_url, api_key, seats[trace.id])

        try:
            episode = await self._env.run_episode(played, context, on_trace=minted)
        finally:
            for name in seats:
                self._relay.routes.pop(name, None)
        return _told(episode, self._relay.base_url, seats)

    async def _served(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._relay.start()
        self._stack.push_async_callback(self._relay.stop)
        await self._stack.enter_async_context(self._env.serving())

    async def close(self) -> None:
        await self._stack.aclose()


def loaded(config: Any) -> Player | ClassicPlayer:
    """The environment of a config, as verifiers itself would resolve it."""
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise ToldError(f"verifiers is not installed for {sys.executable}") from None
    taskset = dict(config["taskset"])
    if is_classic(name := taskset.pop("id")):
        if installed.startswith(("0.1.", "0.2.")):
            return ClassicPlayer(name, taskset)
        raise ToldError(
            f"{name} is a classic environment (load_environment()), which verifiers {installed} runs no more: set "
            '`python` to an interpreter with "verifiers>=0.1.10,<0.3", or port it to a Taskset: its dataset becomes '
            "load(), each reward of its rubric an @vf.reward of the Task, its tools a Toolset"
        )
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise ToldError(
            f"verifiers {installed} has no tasksets of its v1 API, and {name} no load_environment(): "
            'pip install "verifiers>=0.4,<0.5" there'
        ) from error

    try:
        return Player(load_environment(resolve_env_config(config)))
    except ModuleNotFoundError as error:
        raise ToldError(f"{error} (is the taskset's package installed for {sys.executable}?)") from error


def _module_of(path: str) -> ModuleType:
    """A file of nemorl that imports the standard library only."""
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def _row(task: Any) -> dict[str, Any]:
    from verifiers.v1.types import content_text

    data = task.data
    turns = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        turns.append({"role": "user", "content": data.prompt})
    else:
        turns += [{"role": message.role, "content": content_text(message.content)} for message in data.prompt or []]
    return {"prompt": turns, "task": data.model_dump(mode="json")}


def _seat(role: str, taken: Collection[str]) -> str:
    """The next seat of a role: ``solver/1``, ``solver/2``."""
    return f"{role}/{1 + sum(seat.rpartition('/')[0] == role for seat in taken)}"


def _told(episode: Any, policy_url: str, seats: Mapping[str, str]) -> dict[str, Any]:
    """The parts of an episode that nemorl needs."""
    return {
        "ok": episode.ok,
        "is_timeout": episode.is_timeout,
        "errors": _errors(episode.errors),
        "traces": [
            {
                "agent": trace.agent.name,
                "seat": seats[trace.id],
                "trainable": trace.agent.trainable,
                "is_policy": trace.agent.config.client.base_url == policy_url,
                "rewards": {
                    name: None if reward is None else [reward.score, reward.value]
                    for name, reward in trace.rewards.items()
                },
                "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
                "is_timeout": trace.is_timeout,
                "stopped_by": trace.stop_condition,
                "errors": _errors(trace.errors),
                "turns": trace.num_turns,
            }
            for trace in episode.traces
        ],
    }


def _errors(errors: Any) -> list[str]:
    return [f"{error.type}: {error.message}"[:SHOWN] for error in errors]


class Worker:
    """Reads questions, answers each in a task of its own."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._player: Player | ClassicPlayer | None = None

    async def work(self, questions: asyncio.StreamReader) -> None:
        while line := await questions.readline():
            question = json.loads(line)
            number = question.pop("number")
            if question["verb"] == "cancel":
                if number in self._tasks:
                    self._tasks[number].cancel()
                continue
            self._tasks[number] = asyncio.create_task(self._answer(number, **question))
        for task in [*self._tasks.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._player is not None:
            await self._player.close()

    async def _answer(self, number: int, verb: str, **given: Any) -> None:
        said: dict[str, Any]
        try:
            said = {"result": await self._verbs[verb](**given)}
        except ToldError as error:
            said = {"told": str(error)}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"[:SHOWN]}
        finally:
            del self._tasks[number]
        self._answers.write(json.dumps({"number": number, **said}) + "\n")
        self._answers.flush()

    @property
    def _verbs(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        player = self._player
        return {"load": self._load} if player is None else {"tasks": player.tasks, "run": player.run}

    async def _load(self, config: Any) -> str:
        self._player = loaded(config)
        return version("verifiers")


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    questions = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    with suppress(BrokenPipeError):
        await Worker(answers).work(questions)


if __name__ == "__main__":
    asyncio.run(main())
