"""OpenEpisode: one episode as the gateway sees it, from ``open`` to ``close``."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from nemorl_rl.agents.contract import ChatMessage, EpisodePolicy
from nemorl_rl.agents.seats import MOST_LETTERS, Seated
from nemorl_rl.chat.text import TextCoder

from nemorl_agents.gateway.calls import Calls, Newest
from nemorl_agents.gateway.errors import RequestError
from nemorl_agents.gateway.rewards import Answers

if TYPE_CHECKING:
    from nemorl_agents.gateway.gateway import GatewayOptions


SEAT_HEADER = "x-nemorl-seat"
"""The seat in whose name a request asks, where the policy plays several."""
MOST_RESPONSES = 256
"""Responses that ``previous_response_id`` may name, the newest ones."""


@dataclass
class Traffic:
    """Counts of an episode's requests."""

    requests: int = 0
    """To an API, each counted once, retries too."""
    retries: int = 0
    """Answered with what an earlier request had got, or was waiting for."""
    refused: int = 0
    """Answered with an error that is the client's, or the end of its episode."""
    disconnects: int = 0
    """Clients that hung up before they had their answer."""
    failures: int = 0
    """Requests that the policy could not answer."""
    broken_tool_choices: int = 0
    """Answers that did otherwise than ``tool_choice`` or ``parallel_tool_calls`` asked."""
    rewards: int = 0
    """Rewards that the agent gave, those sent again not counted twice."""
    malformed_tool_calls: int = 0
    """Tool calls that could not be read."""
    failure: Exception | None = None
    """The first error of the policy itself. An agent may hide that it got none of its answers; this does not."""

    def metrics(self) -> dict[str, float]:
        """Its numbers under the names by which they are logged."""
        return {f"gateway_{one.name}": float(getattr(self, one.name)) for one in fields(self) if one.name != "failure"}


class OpenEpisode:
    """One episode: its policy, its calls and what its APIs have to remember."""

    def __init__(self, policy: EpisodePolicy, options: GatewayOptions) -> None:
        self.policy, self.options = policy, options
        self.traffic = Traffic()
        self.counting = asyncio.Lock()
        """Held while a prompt is counted, whose images take their time"""
        self.calls = Calls(options.max_concurrent_calls)
        self.histories: Newest[str, tuple[ChatMessage, ...]] = Newest(MOST_RESPONSES)
        """Messages up to each response, for ``previous_response_id``."""
        self.answers = Answers(max(1, policy.limits.max_calls))

    def seated(self, seat: str) -> OpenEpisode:
        """This episode, asked in the name of a seat; an empty one is nobody's.

        Raises:
            RequestError: The name is too long.
        """
        if not seat:
            return self
        if len(seat) > MOST_LETTERS:
            raise RequestError(400, f"{SEAT_HEADER} has {len(seat)} letters", fix=f"use at most {MOST_LETTERS}")
        other = copy.copy(self)
        other.policy = Seated(self.policy, seat)
        return other

    @property
    def text(self) -> TextCoder:
        """Text and tokens of the model.

        Raises:
            RequestError: The policy has no tokenizer.
        """
        if self.policy.text is None:
            raise RequestError(
                400,
                "this endpoint or field needs the model's tokenizer, which this policy does not have",
                fix="use chat completions, responses or messages, without logprobs",
                code="unsupported_parameter",
            )
        return self.policy.text
