"""``POST /v1/reward``: what an agent says that an answer of the policy earned.

Rewards of one answer add up, and stand in the record of the episode at the answer's turn. A reward that is sent again
counts once: a key of its own says so (``Idempotency-Key``), or the SDK's mark of a retry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.errors import UsageError
from nemorl.types import Completion
from nemorl_rl.agents.contract import EpisodeError, EpisodePolicy

from nemorl_agents.gateway.body import number_at, parsed, text_at, whole_at
from nemorl_agents.gateway.calls import Newest
from nemorl_agents.gateway.errors import RequestError, bad_field
from nemorl_agents.gateway.fields import Field, checked, honoured

PATHS = ("/v1/reward", "/reward")
"""After the base URL: clients of OpenAI and of Anthropic have different ones."""
LARGEST_REWARD = 1e9
MOST_GIVEN = 4096
"""Rewards of an episode that are known again, the newest ones."""
LONGEST_KEY = 256
FIELDS: Mapping[str, Field] = {
    "reward": honoured("a finite number, which is added to what the answer has"),
    "response_id": honoured("`id` of the answer; without it, the newest one"),
    "index": honoured("of the choice, where the answer has several (`n`)"),
    "idempotency_key": honoured("as the header `Idempotency-Key`"),
}


@dataclass(frozen=True, slots=True)
class _Given:
    digest: bytes
    """Of the request's body."""
    completion: Completion
    result: Mapping[str, Any]


class Answers:
    """The answers of one episode, under the ids by which its agent knows them, and their rewards."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: Answers that are known, the newest ones.
        """
        self._by_id: Newest[str, tuple[Completion, ...]] = Newest(most)
        self._newest: tuple[str, int, Completion] | None = None
        self._given: Newest[str | bytes, _Given] = Newest(MOST_GIVEN)

    def add(self, response_id: str, completions: Sequence[Completion]) -> None:
        """A response, and the answer of each of its choices."""
        self._by_id.put(response_id, tuple(completions))
        self._newest = response_id, len(completions) - 1, completions[-1]

    def reward(
        self, policy: EpisodePolicy, raw: bytes, *, key: str | None, is_retry: bool
    ) -> tuple[Mapping[str, Any], bool]:
        """Give a reward; returns what the client is told, and whether it was new.

        Args:
            policy: Made the answers.
            raw: Body of the request.
            key: Of its header ``Idempotency-Key``.
            is_retry: The client says that it has sent this before.

        Raises:
            RequestError: The body makes no sense, or there is no such answer.
            EpisodeClosedError: The episode has ended.
        """
        body = checked(parsed(raw), FIELDS)
        if "reward" not in body:
            raise bad_field("reward", "is missing", fix="give a number", code="missing")
        value = number_at(body["reward"], "reward", -LARGEST_REWARD, LARGEST_REWARD)
        key = _key(body.get("idempotency_key", key))
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        earlier = self._given.get(key) if key is not None else None
        if earlier is not None:
            return _again(earlier, digest), False
        response_id, index, completion = self._wanted(body)
        if key is None and is_retry:
            earlier = self._given.get(digest)
            if earlier is not None and earlier.completion is completion:
                return earlier.result, False
        try:
            total = policy.reward(value, completion)
        except EpisodeError:
            raise
        except UsageError as error:
            raise RequestError(400, error.message, fix=error.fix, code="reward_refused") from None
        result = {"object": "reward", "response_id": response_id, "index": index, "reward": value, "total": total}
        self._given.put(digest if key is None else key, _Given(digest, completion, result))
        return result, True

    def _wanted(self, body: Mapping[str, Any]) -> tuple[str, int, Completion]:
        """The answer that a body names, with its id and its number among the choices."""
        if "response_id" not in body:
            if "index" in body:
                raise bad_field("index", "is of no response", fix="name the response with response_id")
            if self._newest is None:
                what = "the policy has answered nothing yet in this episode"
                raise RequestError(400, what, fix="reward an answer after it came", code="no_answer")
            return self._newest
        response_id = text_at(body["response_id"], "response_id")
        found = self._by_id.get(response_id)
        if found is None:
            raise RequestError(
                404,
                f"this episode has no answer with id {response_id[:100]!r}",
                fix="give the `id` of a response as it came",
                code="response_not_found",
                param="response_id",
            )
        if "index" not in body and len(found) > 1:
            raise bad_field(
                "index", "is missing", fix=f"the response has {len(found)} choices: say which", code="missing"
            )
        index = whole_at(body.get("index", 0), "index", 0, len(found) - 1)
        return response_id, index, found[index]


def _key(value: Any) -> str | None:
    if value is None:
        return None
    key = text_at(value, "idempotency_key")
    if not 1 <= len(key) <= LONGEST_KEY:
        raise bad_field("idempotency_key", f"has {len(key)} characters", fix=f"use 1 to {LONGEST_KEY}")
    return key


def _again(earlier: _Given, digest: bytes) -> Mapping[str, Any]:
    if earlier.digest != digest:
        raise RequestError(
            422,
            "this idempotency key was used for another reward",
            fix="use a new key for each reward",
            code="idempotency_key_reused",
            param="idempotency_key",
        )
    return earlier.result
