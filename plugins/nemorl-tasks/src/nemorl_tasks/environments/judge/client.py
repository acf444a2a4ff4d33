"""Asking the judge's server: bounded, retried, within a deadline.

Connections belong to an event loop, and the pool may replace its loop, so there is a client for each loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemorl.errors import UsageError
from nemorl_rl.serving.http_clients import RedirectRefusedError, http_client
from openai import (
    APIConnectionError,
    APIError,
    AsyncOpenAI,
    AuthenticationError,
    NotFoundError,
    PermissionDeniedError,
)

if TYPE_CHECKING:
    from nemorl_tasks.environments.judge.config import JudgeConfig

MAX_REPLY_BYTES = 16 * 2**20
"""Of one reply: the judge's thoughts and its verdict."""
NO_KEY = "none"
"""Sent to servers that ask for no key."""


@dataclass(frozen=True)
class Reply:
    """The text that came back, and what it took."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    retries: int


class JudgeUnavailableError(Exception):
    """No reply to this question, and perhaps to none: the server is down or overloaded, or refuses the question."""


class JudgeClient:
    """Asks one model of one server."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[AsyncOpenAI, asyncio.Semaphore]]
        self._of_loop = weakref.WeakKeyDictionary()

    async def ask(self, parameters: dict[str, Any]) -> Reply:
        """The judge's reply.

        Raises:
            UsageError: the server refuses the key or does not know the model, which no retry will mend.
            JudgeUnavailableError: there was no reply, or not in time.
        """
        config = self._config
        client, slots = self._here()
        try:
            async with asyncio.timeout(config.deadline_s), slots:
                answer = await client.chat.completions.with_raw_response.create(
                    **parameters, extra_body=config.options or None
                )
                said = answer.parse()
        except (AuthenticationError, PermissionDeniedError) as error:
            fix = f"put its key into the environment variable {config.api_key_env}"
            raise UsageError(f"the judge's server {config.url} refuses the key: {error}", fix=fix) from error
        except NotFoundError as error:
            fix = "check environment.url, which ends in /v1 for most servers, and environment.model"
            raise UsageError(f"the server {config.url} has no judge {config.model!r}: {error}", fix=fix) from error
        except TimeoutError as error:
            raise JudgeUnavailableError(f"no reply within {config.deadline_s:g} s") from error
        except APIConnectionError as error:
            if isinstance(error.__cause__, RedirectRefusedError):
                fix = "give the final address in environment.url"
                raise UsageError(f"the judge's server {error.__cause__}", fix=fix) from error
            raise JudgeUnavailableError(f"no connection: {error.__cause__ or error}") from error
        except (APIError, ValueError) as error:  # ValueError: a reply that is no JSON
            raise JudgeUnavailableError(str(error)) from error
        return _reply(said, answer.retries_taken)

    def close(self) -> None:
        """Close the connections of loops that still run; those that have ended took theirs with them."""
        with self._lock:
            clients = [(loop, client) for loop, (client, _) in self._of_loop.items()]
            self._of_loop.clear()
        for loop, client in clients:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_close_on, loop, client)

    def _here(self) -> tuple[AsyncOpenAI, asyncio.Semaphore]:
        config, loop = self._config, asyncio.get_running_loop()
        with self._lock:
            if loop not in self._of_loop:
                client = AsyncOpenAI(
                    base_url=config.url,
                    api_key=os.environ.get(config.api_key_env) or NO_KEY,
                    max_retries=config.retries,
                    timeout=config.deadline_s,
                    http_client=http_client(config.url, timeout_s=config.deadline_s, max_reply_bytes=MAX_REPLY_BYTES),
                )
                self._of_loop[loop] = client, asyncio.Semaphore(config.concurrency)
            return self._of_loop[loop]


def _close_on(loop: asyncio.AbstractEventLoop, client: AsyncOpenAI) -> None:
    loop.create_task(client.close())


def _reply(said: Any, retries: int) -> Reply:
    """The text and token counts of a completion; servers that report no usage count as 0."""
    choices = getattr(said, "choices", None)
    if not choices or choices[0].message is None:
        raise JudgeUnavailableError(f"the server's reply is no chat completion: {said!r:.200}")
    usage = said.usage
    tokens = (0, 0) if usage is None else (usage.prompt_tokens or 0, usage.completion_tokens or 0)
    return Reply(choices[0].message.content or "", *tokens, retries)
