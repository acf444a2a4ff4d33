"""WatchedPolicy: an episode's policy, and what was asked of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nemorl.errors import DataError, UsageError
from nemorl.media import Media
from nemorl.types import Completion

from nemorl_rl.agents.contract import (
    AS_THE_RUN,
    CallOptions,
    ChatMessage,
    ChatReply,
    EpisodeError,
    EpisodePolicy,
    PassedOnPolicy,
    ToolChoice,
)


class WatchedPolicy(PassedOnPolicy):
    """An ``EpisodePolicy`` that remembers its answers and why it refused one. Used from any thread."""

    def __init__(self, policy: EpisodePolicy) -> None:
        super().__init__(policy)
        self.answers = 0
        self.messages: list[ChatMessage] = []
        """Answers to chats."""
        self.refusal: EpisodeError | None = None
        """The last limit that a call met."""
        self.failure: Exception | None = None
        """The last error that is the engine's, not the agent's: of what it asks wrongly, the agent is told."""

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        with self._watching():
            reply = await self._policy.chat(messages, tools=tools, tool_choice=tool_choice, options=options)
        self.messages.append(reply.message)
        self.answers += 1
        return reply

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        with self._watching():
            completion = await self._policy.complete(token_ids, media, options=options)
        self.answers += 1
        return completion

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except EpisodeError as error:
            self.refusal = error
            raise
        except (UsageError, DataError):  # what was asked wrongly, of which the agent is told
            raise
        except Exception as error:
            self.failure = error
            raise
