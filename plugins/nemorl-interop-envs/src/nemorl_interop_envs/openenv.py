"""OpenEnv: a session with a server per episode, over its websocket.

Sessions live on the event loop of the pool, which outlives the turns of an episode.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemorl.environment import Environment
from nemorl.errors import DataError
from nemorl.types import Prompt, Score, Step

if TYPE_CHECKING:
    from nemorl_interop_envs.config import OpenEnvConfig


class OpenEnv(Environment):
    """Episodes on a server."""

    name = "openenv"

    def __init__(self, config: OpenEnvConfig) -> None:
        self._config = config

    def start(self, prompt: Prompt) -> _Session:
        reset = prompt.row.get(self._config.reset_column) or {}
        if not isinstance(reset, Mapping):
            raise DataError(
                f"column {self._config.reset_column!r} of prompt {prompt.text[:60]!r} is {reset!r:.80}, not a mapping",
                fix='give what the server\'s reset takes, e.g. {"seed": 3}, or no such column',
            )
        return _Session(self._config, reset)


class _Session:
    """Connects with the first response, so that episodes that wait for their turn hold no session."""

    def __init__(self, config: OpenEnvConfig, reset: Mapping[str, Any]) -> None:
        self._config, self._reset = config, reset
        self._client: Any = None

    async def step(self, response: str) -> Step:
        """One action. A session whose episode is over, or was given up, is closed."""
        try:
            if self._client is None:
                await self._open()
            result = await self._client.step(_filled(self._config.action, response))
        except BaseException:
            await self._close()
            raise
        score = Score(float(result.reward or 0.0))
        if result.done:
            await self._close()
            return Step(score)
        text = result.observation.get(self._config.text_field)
        if text is None:
            raise DataError(
                f"the server's observation has no {self._config.text_field!r} (it has {', '.join(result.observation)})",
                fix="set environment.text_field to one of them",
            )
        return Step(score, self._config.turn_template.replace("{text}", str(text)), done=False)

    async def _open(self) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(self._config.url, message_timeout_s=self._config.message_timeout_s)
        # Nobody tells an episode that no more turns will come; then it is forgotten.
        weakref.finalize(self, _close_later, self._client, asyncio.get_running_loop()).atexit = False
        await self._client.connect()
        await self._client.reset(**self._reset)

    async def _close(self) -> None:
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
