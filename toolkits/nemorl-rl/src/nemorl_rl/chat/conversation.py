"""Conversation: what one episode has said, as messages and as the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.types import Completion

from nemorl_rl.agents.contract import ChatMessage, ChatReply, ToolChoice
from nemorl_rl.chat.codec import ChatCodec


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as tokens, ready to be answered."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    token_ids: tuple[int, ...]
    realigned_tokens: int = 0
    """Sampled tokens of recognised answers that had to be written anew."""


class Conversation:
    """Used by one episode, from any thread."""

    def __init__(self, codec: ChatCodec, seed: int) -> None:
        """
        Args:
            codec: Of the policy's model.
            seed: From which ids of tool calls are minted.
        """
        self._codec, self._seed = codec, seed

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> ChatPrompt:
        """The tokens of a history: recognised answers as they were sampled, the rest as the template writes it."""
        return ChatPrompt(tuple(messages), tuple(tools), self._codec.render(messages, tools))

    def reply(self, prompt: ChatPrompt, completion: Completion, tool_choice: ToolChoice = "auto") -> ChatReply:
        """The answer as a message, remembered to be recognised."""
        parsed = self._codec.parse(completion.token_ids, prompt.token_ids)
        message = {"role": "assistant", "content": parsed.content}
        return ChatReply(message, completion, len(prompt.token_ids))
