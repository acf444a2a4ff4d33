"""The process of an isolated plugin: describes, checks and runs its parts for a driver that cannot import them.

Runs under the plugin's own interpreter (``python -I -m nemorl_trust.isolation.server FD``) and talks through one
socket, in the messages of :mod:`nemorl_trust.isolation.wire`; what it prints goes elsewhere. Calls run in threads, so
a slow one holds nobody up; the process ends when the driver does.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

from nemorl.config.load import validate
from nemorl.contracts.environment import as_step
from nemorl.errors import ConfigError, UsageError
from nemorl.plugins import kinds
from nemorl.types import Prompt, Score, Step
from pydantic import ValidationError

from nemorl_trust.isolation.wire import (
    ERROR,
    MAX_ERROR_CHARACTERS,
    PAGE_BYTES,
    REPLIES,
    RESULT,
    ClassData,
    WireError,
    packed,
    receive,
    send,
)

NOT_ASKED = ("ranks_per_copy", "data_shards")
"""Methods of training backends with which a driver lays out its data. They take objects that do not travel."""


class Server:
    """The verbs that a driver may call, and the objects that it has built."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        # From anywhere, so that the numbers of a process that died are none of those of its successor.
        self._numbers = count(secrets.randbelow(1 << 32))
        self._lock = threading.Lock()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._turn, name="isolated-plugin-loop", daemon=True).start()

    def describe(self, value: str) -> dict[str, Any]:
        """Description of a config class for its stand-in."""
        plugin = _config_class(value)
        return {
            "doc": plugin.__doc__ or "",
            "missing_modules": plugin.missing_modules(),
            "class_data": {name: getattr(plugin, name) for name in ClassData.model_fields if name in dir(plugin)},
            "schema": plugin.model_json_schema(),
            "options": plugin.describe_options(),
            "not_asked": [
                name
                for name in NOT_ASKED
                if issubclass(plugin, kinds.TrainingBackendConfig)
                and getattr(plugin, name) is not getattr(kinds.TrainingBackendConfig, name)
            ],
        }

    def check(self, value: str, options: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
        """Problems of these options: (path, message, fix) each."""
        try:
            validate(_config_class(value), options)
        except ConfigError as error:
            return [(problem.path, problem.message, problem.fix) for problem in error.problems]
        except ValidationError as error:
            return [("", str(error), None)]
        return []

    def devices_per_replica(self, value: str, options: Mapping[str, Any]) -> int:
        return int(_config_class(value).model_validate(options).devices_per_replica)

    def dataset(self, value: str, options: Mapping[str, Any], split: str) -> tuple[int, int] | None:
        """Build a dataset: its number and how many rows it has; ``None`` where it has no such split."""
        rows = _config_class(value).model_validate(options).build(split)
        return None if rows is None else (self._keep(rows), len(rows))

    def rows(self, dataset: int, first: int) -> list[dict[str, Any]]:
        """Rows from one on, as many as fit a message well."""
        rows, page, size = self._objects[dataset], [], 0
        for index in range(first, len(rows)):
            page.append(dict(rows[index]))
            size += len(packed(page[-1]))
            if size > PAGE_BYTES and len(page) > 1:
                return page[:-1]
        return page

    def environment(self, value: str, options: Mapping[str, Any]) -> tuple[int, str, bool]:
        """Build an environment: its number, name and whether it is batched."""
        built = _config_class(value).model_validate(options).build()
        if built.drives_policy:
            raise UsageError(
                f"{built.owner} drives the policy itself, which an isolated environment cannot",
                fix="install its plugin beside nemorl, not isolated, or let it define start() in place of rollout()",
            )
        return self._keep(built), built.name, built.batched

    def logger(self, value: str, options: Mapping[str, Any], run_dir: str) -> int:
        return self._keep(_config_class(value).model_validate(options).build(Path(run_dir)))

    def start(self, environment: int, prompt: Mapping[str, Any]) -> int:
        lists = {name: tuple(prompt[name]) for name in ("token_ids", "messages")}
        return self._keep(self._objects[environment].start(Prompt(**{**prompt, **lists})))

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

    def _turn(self) -> None:
        """Run the event loop. A task of the plugin's that raises SystemExit ends by it, and not the loop with it."""
        while True:
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def _keep(self, built: Any) -> int:
        with self._lock:
            number = next(self._numbers)
            self._objects[number] = built
        return number


def serve(connection: socket.socket) -> None:
    """Answer calls until the other side is gone."""
    server, sending = Server(), threading.Lock()

    def reply(call: int, result: Any) -> None:
        try:
            kind, body = RESULT, packed(result)
        except WireError as error:
            kind, body = ERROR, f"this plugin {error}".encode()
        with sending:
            send(connection, call, kind, body)

    def refuse(call: int, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        with sending:
            send(connection, call, ERROR, text.encode(errors="replace"))

    def run(call: int, body: bytes) -> None:
        try:
            verb, *args = json.loads(body)
            if verb not in REPLIES:
                raise WireError(f"there is no verb {verb!r}")
            result = getattr(server, verb)(*args)
            if isinstance(result, Awaitable):
                server.loop.call_soon_threadsafe(lambda: server.loop.create_task(settle(call, result)))
            else:
                reply(call, result)
        except BaseException as error:
            refuse(call, error)

    async def settle(call: int, awaited: Awaitable[Any]) -> None:
        try:
            reply(call, await awaited)
        except BaseException as error:
            refuse(call, error)

    reply(0, metadata.version("nemorl-core"))
    while True:
        try:
            call, _, body = receive(connection)
        except (EOFError, OSError, WireError):
            os._exit(0)  # threads that are stuck must not keep the process
        threading.Thread(target=run, args=(call, body), daemon=True).start()


async def _later(answer: Awaitable[Step]) -> Step:
    return _plain_step(await answer)


def _plain_step(step: Step) -> Step:
    """Without the number types of libraries that the driver may lack."""
    step = as_step(step)
    score = step.score
    plain = Score(
        float(score.reward),
        {name: float(value) for name, value in score.components.items()},
        {name: float(value) for name, value in score.metrics.items()},
        None if score.correct is None else bool(score.correct),
        None if score.answer is None else str(score.answer),
        bool(score.valid),
        tuple(map(float, score.turn_rewards)),
        score.outcome,
        str(score.cause),
        str(score.feedback),
    )
    return Step(plain, None if step.observation is None else str(step.observation), bool(step.done))


def _config_class(value: str) -> Any:
    return metadata.EntryPoint("isolated", value, "nemorl").load()


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)  # programs that the plugin starts are none of the driver's
    serve(socket.socket(fileno=int(sys.argv[1])))
