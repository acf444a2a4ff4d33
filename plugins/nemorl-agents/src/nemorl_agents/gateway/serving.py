"""ServedPolicy: a model on disk for whoever asks, conversation by conversation. Nothing is trained, little is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Any

from nemorl.errors import UsageError
from nemorl.media import Media
from nemorl.types import Completion
from nemorl_rl.agents.contract import (
    AS_THE_RUN,
    CallOptions,
    ChatMessage,
    ChatReply,
    EpisodeLimits,
    ToolChoice,
)
from nemorl_rl.agents.policy import LivePolicy, Sampler
from nemorl_rl.chat.codec import ChatCodec
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.rollouts.seeding import derive_seed

from nemorl_agents.gateway.calls import Newest

MOST_CONVERSATIONS = 256
"""That are remembered; one that was forgotten goes on from its messages as the template writes them."""
MOST_CALLS = 64
"""Of one conversation before it is forgotten."""


@dataclass
class _Remembered:
    policy: LivePolicy
    calls: int = 0


class ServedPolicy:
    """An ``EpisodePolicy`` without an end: a conversation has a policy of its own, which recognises its turns."""

    episode_id = "nemorl serve"

    def __init__(self, sampler: Sampler, codec: ChatCodec, limits: EpisodeLimits, *, seed: int) -> None:
        """
        Args:
            sampler: Where calls go.
            codec: Messages to tokens and back.
            limits: Of each call: ``max_calls`` does not count here.
            seed: Seeds all calls, each differently.
        """
        self.limits, self.text = limits, sampler.text
        self._sampler, self._codec, self._seed = sampler, codec, seed
        self._numbers = count()
        self._lock = threading.Lock()
        self._remembered: Newest[bytes, _Remembered] = Newest(MOST_CONVERSATIONS)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        policy = self._policy_of(_beginning(messages, tools))
        return await policy.chat(messages, tools=tools, tool_choice=tool_choice, options=options)

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        return await self._new().complete(token_ids, media, options=options)

    def reward(self, value: float, completion: Completion | None = None) -> float:
        """Nothing is learnt here.

        Raises:
            UsageError: Always.
        """
        raise UsageError("nothing is learnt from a model that is served", fix="reward answers in a run")

    def _policy_of(self, beginning: bytes) -> LivePolicy:
        with self._lock:
            found = self._remembered.get(beginning)
            if found is None or found.calls >= MOST_CALLS:
                found = _Remembered(self._new())
            self._remembered.put(beginning, found)
            found.calls += 1
            return found.policy

    def _new(self) -> LivePolicy:
        number = next(self._numbers)
        seed = derive_seed(self._seed, number)
        conversation = Conversation(self._codec, seed)
        name = f"conversation {number}"
        return LivePolicy(self._sampler, conversation, episode_id=name, limits=self.limits, seed=seed)


def _beginning(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for the calls of one conversation: its messages up to the user's first, and its tools."""
    until = next((number for number, one in enumerate(messages) if one["role"] == "user"), len(messages) - 1)
    said = [[*map(dict, messages[: until + 1])], [*map(dict, tools)]]
    text = json.dumps(said, sort_keys=True, default=repr)  # of an image or a sound it tells the digest
    return sha256(text.encode()).digest()
