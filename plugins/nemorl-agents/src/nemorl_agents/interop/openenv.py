"""OpenEnv: a session with a server per episode, over its websocket.

Sessions live on the event loop of the pool, which outlives the turns of an episode.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Awaitable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from httpx2 import HTTPError
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError, UsageError
from nemorl.types import Prompt, Score, Step
from nemorl_rl.environments.loop_thread import in_thread
from nemorl_rl.serving.http_clients import read_json

if TYPE_CHECKING:
    from nemorl_rl.agents.contract import EpisodePolicy

    from nemorl_agents.interop.config import OpenEnvConfig


SCHEMA_S = 10.0
GIVE_UP_AFTER = 8
"""First actions that the server fails at."""
REFUSED = "action_refused"


class OpenEnv(Environment):
    """Episodes on a server."""

    name = "openenv"

    def __init__(self, config: OpenEnvConfig) -> None:
        self._config = config
        self._actions = _Actions()

    def start(self, prompt: Prompt) -> _Session:
        reset = prompt.row.get(self._config.reset_column) or {}
        if not isinstance(reset, Mapping):
            raise DataError(
                f"column {self._config.reset_column!r} of prompt {prompt.text[:60]!r} is {reset!r:.80}, not a mapping",
                fix='give what the server\'s reset takes, e.g. {"seed": 3}, or no such column',
            )
        return _Session(self._config, reset, self._actions)

    async def try_out(self, prompt: Prompt, policy: EpisodePolicy) -> None:
        """The server answers, and takes actions and gives observations as the config says."""
        url = self._config.url
        session = self.start(prompt)
        try:
            schema = await in_thread(_schema, url)
            await session.open()
        except (OSError, RuntimeError, TimeoutError) as error:
            raise UsageError(
                f"the OpenEnv server at {url} does not begin an episode: {type(error).__name__}: {error}",
                fix="start it, or correct environment.url, and the row's reset",
            ) from error
        finally:
            await session.close()
        for problem in _schema_problems(schema, self._config):
            raise problem


def _schema(url: str) -> Mapping[str, Any]:
    """The JSON schemas that a server tells of; nothing where it tells none."""
    address = re.sub(r"^ws", "http", url).removesuffix("/").removesuffix("/ws")
    try:
        told = read_json(f"{address}/schema", timeout_s=SCHEMA_S)
    except (HTTPError, ValueError):  # if nobody is there, the session says so
        return {}
    return told if isinstance(told, Mapping) else {}


def _schema_problems(schema: Mapping[str, Any], config: OpenEnvConfig) -> Iterator[UsageError]:
    action, observation = (schema.get(name) or {} for name in ("action", "observation"))
    known = action.get("properties") or {}
    unknown = sorted(config.action.keys() - known.keys()) if action.get("additionalProperties") is False else []
    missing = sorted(set(action.get("required") or ()) - config.action.keys())
    if unknown or missing:
        what = " and ".join([f"knows no {name!r}" for name in unknown] + [f"needs {name!r}" for name in missing])
        fix = f"set environment.action, with {', '.join(known)}"
        yield UsageError(f"the server's action {what}", fix=fix)
    fields = observation.get("properties") or {}
    if fields and config.text_field not in fields and observation.get("additionalProperties") is False:
        yield UsageError(
            f"the server's observation has no {config.text_field!r} (it has {', '.join(fields)})",
            fix="set environment.text_field to one of them",
        )


class _Actions:
    """Of all sessions: a server that fails at what a policy wrote is no reason to end a run, one that never took an
    action is."""

    def __init__(self) -> None:
        self._were_taken = False
        self._refused = 0

    async def take(self, step: Awaitable[Any]) -> Any:
        """The server's answer; ``None`` where it fails at the action.

        Raises:
            UsageError: It has failed at all first actions.
        """
        try:
            result = await step
        except RuntimeError as error:  # its client's word for an error that the server tells of
            self._refused += 1
            if not self._were_taken and self._refused >= GIVE_UP_AFTER:
                raise UsageError(
                    f"the OpenEnv server refused the first {self._refused} actions; the last one: {error}",
                    fix="correct environment.action, or mend the server",
                ) from error
            return None
        self._were_taken = True
        return result


class _Session:
    """Connects with the first response, so that episodes that wait for their turn hold no session."""

    def __init__(self, config: OpenEnvConfig, reset: Mapping[str, Any], actions: _Actions) -> None:
        self._config, self._reset, self._actions = config, reset, actions
        self._client: Any = None

    async def step(self, response: str) -> Step:
        """One action. A session whose episode is over, or was given up, is closed."""
        try:
            if self._client is None:
                await self.open()
            result = await self._actions.take(self._client.step(_filled(self._config.action, response)))
        except BaseException:
            await self.close()
            raise
        if result is None:
            await self.close()
            return Step(Score(0.0, metrics={REFUSED: 1.0}))
        score = Score(float(result.reward or 0.0), metrics={REFUSED: 0.0})
        if result.done:
            await self.close()
            return Step(score)
        text = result.observation.get(self._config.text_field)
        if text is None:
            raise DataError(
                f"the server's observation has no {self._config.text_field!r} (it has {', '.join(result.observation)})",
                fix="set environment.text_field to one of them",
            )
        return Step(score, self._config.turn_template.replace("{text}", str(text)), done=False)

    async def open(self) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(self._config.url, message_timeout_s=self._config.message_timeout_s)
        # Nobody tells an episode that no more turns will come; then it is forgotten.
        weakref.finalize(self, _close_later, self._client, asyncio.get_running_loop()).atexit = False
        await self._client.connect()
        await self._client.reset(**self._reset)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _close_later(client: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Closing twice is harmless, and a loop that has ended took its connections with it."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(client.close()))


def _filled(form: Any, response: str) -> Any:
    """The action's form with the response in it."""
    if isinstance(form, str):
        return form.replace("{response}", response)
    if isinstance(form, Mapping):
        return {key: _filled(value, response) for key, value in form.items()}
    if isinstance(form, list | tuple):
        return [_filled(value, response) for value in form]
    return form
