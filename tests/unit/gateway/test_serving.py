"""Conversations of ``nemorl serve``: each has its own state, and there are never more than so many."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl_agents.gateway import serving
from nemorl_agents.gateway.serving import ServedPolicy
from nemorl_rl.agents.contract import CallOptions, EpisodeLimits
from nemorl_rl.agents.policy import Sampler
from nemorl_rl.chat.codec import ParsedAnswer

LIMITS = EpisodeLimits(max_sequence_tokens=100, max_new_tokens=10, max_calls=3, timeout_s=5.0)


class Engine:
    """Answers every prompt with one token, and remembers who asked for what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, GenerationRequest]] = []

    def submit(self, request: GenerationRequest, *, owner: str, **_: Any) -> Future[list[Completion]]:
        self.asked.append((owner, request))
        answer: Future[list[Completion]] = Future()
        answer.set_result([Completion((9,), (-0.5,), "stop")])
        return answer


class Codec:
    """Each message is one token."""

    family = None

    def render(self, messages: Any, tools: Any) -> tuple[int, ...]:
        return tuple(range(len(messages)))

    def extend(self, spoken: Any, messages: Any, tools: Any) -> None:
        return None

    def parse(self, token_ids: Any, prompt_ids: Any, tools: Any) -> ParsedAnswer:
        return ParsedAnswer("nine")


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def policy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> ServedPolicy:
    monkeypatch.setattr(serving, "MOST_CALLS", 3)
    monkeypatch.setattr(serving, "MOST_CONVERSATIONS", 2)
    sampler = Sampler(engine, SamplingParams(temperature=1.0), honours_clients=True)  # type: ignore[arg-type]
    return ServedPolicy(sampler, Codec(), LIMITS, seed=1)


def ask(policy: ServedPolicy, *texts: str, **options: Any) -> None:
    messages = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]
    asyncio.run(policy.chat(messages, options=CallOptions(**options)))


def test_a_conversation_keeps_its_state_until_it_is_long_or_old(policy: ServedPolicy, engine: Engine) -> None:
    ask(policy, "a")
    ask(policy, "a", "nine", "more")
    ask(policy, "b")
    ask(policy, "a", "nine", "more", "nine", "more")
    ask(policy, "a", "nine", "again")  # the fourth call: begun anew
    ask(policy, "c")
    ask(policy, "d")
    ask(policy, "a")  # forgotten: two newer ones came
    numbers = [owner.removeprefix("conversation ") for owner, _ in engine.asked]
    assert numbers == ["0", "0", "1", "0", "2", "3", "4", "5"]


def test_clients_choose_their_sampling(policy: ServedPolicy, engine: Engine) -> None:
    ask(policy, "a", temperature=0.2, top_p=0.5, top_k=3, max_new_tokens=2, stop=("x",))
    ((_, request),) = engine.asked
    expected = SamplingParams(temperature=0.2, top_p=0.5, top_k=3, max_new_tokens=2, stop_strings=("x",))
    assert request.sampling == expected


def test_completions_have_no_state(policy: ServedPolicy, engine: Engine) -> None:
    for _ in range(5):
        asyncio.run(policy.complete([1, 2]))
    assert len({owner for owner, _ in engine.asked}) == 5
    assert len({request.seeds for _, request in engine.asked}) == 5
