"""The process of an isolated plugin: describes, checks and runs its parts for a driver that cannot import them.

Runs under the plugin's own interpreter (``python -I -m nemorl.plugins.isolated_server FD``) and talks through one
socket. Messages are pickles of plain data: numbers, texts, JSON and nemorl's own types. Calls run in threads, so a slow
one holds nobody up; the process ends when the driver does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nemorl.config.load import validate
from nemorl.environments.base import as_score
from nemorl.environments.threads import LoopThread
from nemorl.errors import ConfigError
from nemorl.types import Prompt, Score, Step


class Server:
    """The verbs that a driver may call, and the objects that it has built."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._lock = threading.Lock()
        self.loop = LoopThread("isolated-plugin-loop")

    def describe(self, value: str) -> dict[str, Any]:
        """What the stand-in of a config class must know, as plain data."""
        plugin = _config_class(value)
        data = ("summary", "install_hint", "requires_modules", "supports", "weight_transports")
        return {
            "doc": plugin.__doc__ or "",
            "missing_modules": plugin.missing_modules(),
            "class_data": {name: getattr(plugin, name) for name in data if name in dir(plugin)},
            "schema": plugin.model_json_schema(),
            "options": plugin.describe_options(),
        }

    def check(self, value: str, options: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
        """What is wrong with these options: (path, message, fix) each."""
        try:
            validate(_config_class(value), options)
        except ConfigError as error:
            return [(problem.path, problem.message, problem.fix) for problem in error.problems]
        except ValidationError as error:
            return [("", str(error), None)]
        return []

    def ask(self, value: str, options: Mapping[str, Any], attribute: str) -> Any:
        """A property of the config, e.g. ``devices_per_replica``."""
        return getattr(_config_class(value).model_validate(options), attribute)

    def rows(self, value: str, options: Mapping[str, Any], split: str) -> str:
        """The rows of a dataset's split as JSON: rows are plain data."""
        rows = _config_class(value).model_validate(options).build(split)
        return json.dumps(None if rows is None else [dict(rows[index]) for index in range(len(rows))])

    def environment(self, value: str, options: Mapping[str, Any]) -> tuple[int, str, bool]:
        """Build an environment: its number, name and whether it is batched."""
        built = _config_class(value).model_validate(options).build()
        return self._keep(built), built.name, built.batched

    def logger(self, value: str, options: Mapping[str, Any], run_dir: str) -> int:
        return self._keep(_config_class(value).model_validate(options).build(Path(run_dir)))

    def start(self, environment: int, prompt: Prompt) -> int:
        return self._keep(self._objects[environment].start(prompt))

    def step(self, episode: int, response: str) -> Any:
        """One turn; awaitable where the environment's is."""
        answer = self._objects[episode].step(response)
        return _later(answer) if isinstance(answer, Awaitable) else _plain_step(answer)

    def log(self, logger: int, metrics: Mapping[str, float], step: int) -> None:
        self._objects[logger].log(metrics, step)

    def close(self, number: int) -> None:
        self._objects[number].close()

    def forget(self, number: int) -> None:
        with self._lock:
            self._objects.pop(number, None)

    def _keep(self, built: Any) -> int:
        with self._lock:
            number = max(self._objects, default=0) + 1
            self._objects[number] = built
        return number


def serve(connection: Connection) -> None:
    """Answer calls until the other side is gone."""
    server, sending = Server(), threading.Lock()

    def reply(call: int, ok: bool, result: Any) -> None:
        with sending:
            connection.send((call, ok, result))

    def run(call: int, verb: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = verb(*args)
            if isinstance(result, Awaitable):
                server.loop.loop.call_soon_threadsafe(lambda: server.loop.loop.create_task(_settle(call, result)))
            else:
                reply(call, True, result)
        except BaseException as error:
            reply(call, False, f"{type(error).__name__}: {error}")

    async def _settle(call: int, awaited: Awaitable[Any]) -> None:
        try:
            reply(call, True, await awaited)
        except BaseException as error:
            reply(call, False, f"{type(error).__name__}: {error}")

    reply(0, True, metadata.version("nemorl-core"))
    while True:
        try:
            call, verb, args = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # threads that are stuck must not keep the process
        threading.Thread(target=run, args=(call, getattr(server, verb), args), daemon=True).start()


async def _later(answer: Awaitable[Step]) -> Step:
    return _plain_step(await answer)


def _plain_step(step: Step) -> Step:
    """Without the number types of libraries that the driver may lack."""
    score = as_score(step.score)
    plain = Score(
        float(score.reward),
        {name: float(value) for name, value in score.components.items()},
        {name: float(value) for name, value in score.metrics.items()},
        None if score.correct is None else bool(score.correct),
        None if score.answer is None else str(score.answer),
    )
    return Step(plain, None if step.observation is None else str(step.observation), bool(step.done))


def _config_class(value: str) -> Any:
    return metadata.EntryPoint("isolated", value, "nemorl").load()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
