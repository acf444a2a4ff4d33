"""Episodes over a real engine: what clients are told is what the policy's record holds, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl_agents.gateway.gateway import Gateway
from nemorl_rl.agents.contract import EpisodeLimits
from nemorl_rl.agents.policy import LivePolicy, Sampler
from nemorl_rl.agents.record import sequences
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.chat.text import TokenizerText
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.placement.engines import standalone_generation
from nemorl_testing.models import tiny_model

LIMITS = EpisodeLimits(max_sequence_tokens=256, max_new_tokens=12, max_calls=4, timeout_s=60.0)
QUESTION = {"role": "user", "content": "12+7="}
ONWARD = {"role": "user", "content": "and 1?"}

Begin = Callable[[], LivePolicy]


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(str(folder))


@pytest.fixture(scope="module")
def begin(folder: Path, tokenizer: Tokenizer) -> Iterator[Begin]:
    generation = GenerationConfig.model_validate({"backend": "hf", "max_new_tokens": 12})
    engine = standalone_generation(generation, PolicyConfig(model_name=str(folder), max_sequence_tokens=256))
    codec = codec_of(tokenizer)
    text = TokenizerText(tokenizer, codec)
    sampler = Sampler(engine, generation.sampling(), honours_clients=False, text=text)

    def new() -> LivePolicy:
        return LivePolicy(sampler, Conversation(codec, 5), episode_id="episode 0.0", limits=LIMITS, seed=5)

    yield new
    engine.shutdown()


@pytest.fixture
def gateway(tokenizer: Tokenizer) -> Iterator[Gateway]:
    with Gateway() as found:
        yield found


def test_logprobs_and_usage_are_those_of_the_record(gateway: Gateway, begin: Begin, tokenizer: Tokenizer) -> None:
    policy = begin()
    access = gateway.open(policy)
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
    answer = client.chat.completions.create(model="policy", messages=[QUESTION], logprobs=True)  # type: ignore
    (call,) = policy.calls
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert [entry.token for entry in entries] == [tokenizer.inner.decode([one]) for one in call.completion.token_ids]
    assert [entry.logprob for entry in entries] == [*call.completion.logprobs]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(call.prompt_ids)
    assert answer.usage.completion_tokens == len(call.completion.token_ids)


def test_clients_that_append_give_one_sequence_and_a_fork_two(gateway: Gateway, begin: Begin) -> None:
    def openai_chat(access: Any) -> None:
        client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
        history: list[Any] = [QUESTION]
        for _ in range(3):
            answer = client.chat.completions.create(model="policy", messages=history)
            history += [answer.choices[0].message, ONWARD]

    def openai_responses(access: Any) -> None:
        client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
        before = None
        for _ in range(3):
            asked: Any = {"input": [QUESTION if before is None else ONWARD], "previous_response_id": before}
            before = client.responses.create(model="policy", **asked).id

    def anthropic_messages(access: Any) -> None:
        client = anthropic.Anthropic(base_url=access.base_url, api_key=access.api_key)
        history: list[Any] = [QUESTION]
        for _ in range(3):
            answer = client.messages.create(model="policy", max_tokens=12, messages=history)
            history += [{"role": "assistant", "content": answer.content}, ONWARD]

    for play in (openai_chat, openai_responses, anthropic_messages):
        policy = begin()
        play(gateway.open(policy))
        assert len(policy.calls) == 3
        (one,) = sequences(policy.calls)
        trained = [token for token, is_sampled in zip(one.token_ids, one.response_mask, strict=True) if is_sampled]
        assert trained == [token for call in policy.calls for token in call.completion.token_ids]
        assert sum(call.realigned_tokens for call in policy.calls) == 0

    policy = begin()
    access = gateway.open(policy)
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
    client.chat.completions.create(model="policy", messages=[QUESTION], n=2)  # type: ignore
    assert len(sequences(policy.calls)) == 2


def test_the_runs_sampling_holds_in_training_and_its_limits_are_the_apis_errors(gateway: Gateway, begin: Begin) -> None:
    policy = begin()
    access = gateway.open(policy)
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
    ask: Any = {"model": "policy", "messages": [QUESTION], "seed": 3}
    cold, warm = (client.chat.completions.create(**ask, temperature=one) for one in (0.0, 2.0))
    assert cold.choices[0].message.content == warm.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ask, "messages": [{"role": "user", "content": "1" * 300}]})
    assert "maximum context length is 256 tokens" in str(caught.value)
    assert len(policy.calls) == 2
    for _ in range(2):
        client.chat.completions.create(**ask)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**ask)
    assert "4 answers" in str(caught.value)
    policy.close()
    with pytest.raises(openai.ConflictError) as caught:
        client.chat.completions.create(**ask)
    assert "has ended" in str(caught.value)
    assert gateway.close(access).metrics()["gateway_refused"] == 3.0


def test_a_format_that_the_backend_cannot_hold_to_is_refused_by_name_and_the_episode_goes_on(
    gateway: Gateway, begin: Begin
) -> None:
    policy = begin()
    access = gateway.open(policy)
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
    ask: Any = {"model": "policy", "messages": [QUESTION]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask, response_format={"type": "json_object"})
    assert "response_format: this generation backend cannot constrain" in str(caught.value)
    assert "generation.backend: vllm" in str(caught.value)
    client.chat.completions.create(**ask)
    assert len(policy.calls) == 1
    assert gateway.close(access).failure is None
