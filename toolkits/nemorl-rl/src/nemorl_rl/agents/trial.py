"""A trial episode, before the model is loaded: do the environment's servers and programs run, are tools shown?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.contracts.environment import Environment
from nemorl.errors import DataError, boundary
from nemorl.media import Media
from nemorl.types import Completion, Row

from nemorl_rl.agents.contract import (
    AS_THE_RUN,
    CallLimitError,
    CallOptions,
    ChatMessage,
    ChatReply,
    EpisodeLimits,
    ToolChoice,
)
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.text import TextCoder
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments.loop_thread import LoopThread
from nemorl_rl.rollouts.prompts import to_prompt

ANSWER = "This is a trial."
CALLS = 2
"""Answers of the trial policy."""
LIMITS = EpisodeLimits(max_sequence_tokens=1 << 20, max_new_tokens=64, max_calls=CALLS, timeout_s=120.0)


class TrialPolicy:
    """Says the same to everything, and how messages and tools look to the model it stands for."""

    episode_id, limits = "trial", LIMITS
    text: TextCoder | None = None

    def __init__(self, tokenizer: Tokenizer, renderer: str | None) -> None:
        """
        Args:
            tokenizer: Of the model.
            renderer: Writes messages in place of its chat template.
        """
        self._codec = codec_of(tokenizer, renderer)
        self._tokens = tuple(tokenizer.encode(ANSWER))
        self._calls = 0
        self.problem: DataError | None = None
        """The first call that the model's template cannot write. Whoever called may not tell of it."""

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        try:
            asked = self._codec.render(messages, list(tools))
        except DataError as error:
            self.problem = self.problem or error
            raise
        return ChatReply({"role": "assistant", "content": ANSWER}, await self.complete(asked), len(asked))

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        self._calls += 1
        if self._calls > CALLS:
            raise CallLimitError("this is a trial", fix="stop here")
        return Completion(self._tokens, (0.0,) * len(self._tokens), "stop")

    def reward(self, value: float, completion: Completion | None = None) -> float:
        return value


def try_out(environment: Environment, row: Row | None, tokenizer: Tokenizer, renderer: str | None) -> None:
    """Have an environment try whether episodes can begin, on a row.

    Args:
        environment: To be tried.
        row: The first one; without any, nothing is tried.
        tokenizer: Of the model.
        renderer: Writes messages in place of its chat template.

    Raises:
        NemorlError: What is to be mended.
    """
    if row is None or type(environment).try_out is Environment.try_out:
        return
    prompt, policy, loop = to_prompt(row, 0, tokenizer), TrialPolicy(tokenizer, renderer), LoopThread("trial")
    try:
        with boundary(environment.owner):
            asyncio.run_coroutine_threadsafe(environment.try_out(prompt, policy), loop.loop).result()
    except Exception:
        if policy.problem is not None:  # which is why
            raise policy.problem from None
        raise
    finally:
        loop.stop()
