"""Whatever a policy writes, each API answers with what its own client reads: an episode never fails for it.

Outputs are random tokens of a byte-level tokenizer, and calls of tools that were mutated: cut anywhere, bytes changed,
marks doubled, left out or nested, arguments of any kind of JSON or none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import anthropic
import openai
import pytest
from chat_models import ADD, template
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl_agents.gateway.gateway import Gateway
from nemorl_rl.agents.contract import EpisodeLimits
from nemorl_rl.agents.policy import LivePolicy, Sampler
from nemorl_rl.agents.record import sequences
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.chat.text import TokenizerText
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

LIMITS = EpisodeLimits(max_sequence_tokens=1 << 20, max_new_tokens=1 << 14, max_calls=1 << 20, timeout_s=60.0)
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]")
PLANTED = [
    "",
    " \n",
    "\x00\x1f",
    "<think>without end",
    "</think>",
    "<think></think>",
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"\\udfff": 1}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN, "b": -Infinity}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": null}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 3000 + "]" * 3000 + "}}</tool_call>",
    '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "no_such_tool", "arguments": {"c": {}}}</tool_call>',
    '<tool_call>[add(a="\\ud800", b=1e999)]</tool_call>',
    "<tool_call>[add(**x)]</tool_call>",
    "<tool_call>[add(a=...)]</tool_call>",
    "<tool_call>[add(a={1: 2}, b={3}, c=b'x', d=1j)]</tool_call>",
    "<tool_call><function=add><parameter=a>\\ud800</parameter></function></tool_call>",
    '<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>"\\ud800"</arg_value>\n</tool_call>',
    "<tool_call>\n</tool_call>",
    "<tool_call>",
    '{"name": "add", "parameters": {"a": 1}}',
]
SHORT = [one for one in PLANTED if len(one) < 500]


def tokenizer_of_bytes() -> Tokenizer:
    """A token for every byte, and Qwen3's chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(mark, special=mark.startswith("<|")) for mark in MARKS])
    inner: Any = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")  # type: ignore[no-untyped-call]
    inner.chat_template = template("qwen3")
    return Tokenizer(inner)


class Mutants:
    """Says one output after another: planted ones, these mutated, and random tokens."""

    def __init__(self, tokenizer: Tokenizer, seed: int, *, cuts: bool) -> None:
        self._cuts = cuts
        self._tokenizer, self._rng, self._count = tokenizer, random.Random(seed), 0
        self._size = len(tokenizer.inner)
        self._eos = tokenizer.inner.eos_token_id

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        ids, is_cut = self._ids(), self._cuts and self._rng.random() < 0.2
        ids = ids if is_cut and ids else (*ids, self._eos)
        answer: Future[list[Completion]] = Future()
        reason = "length" if is_cut else "stop"
        answer.set_result([Completion(ids, (-0.5,) * len(ids), reason, (1,))])  # type: ignore[arg-type]
        return answer

    def _ids(self) -> tuple[int, ...]:
        rng, number = self._rng, self._count
        self._count += 1
        if number < len(PLANTED):
            return tuple(self._tokenizer.encode(PLANTED[number]))
        if rng.random() < 0.25:
            return tuple(rng.randrange(self._size) for _ in range(rng.randrange(40)))
        ids = [*self._tokenizer.encode("".join(rng.choices(SHORT, k=rng.randint(1, 3))))]
        for _ in range(rng.randint(0, 4)):
            place = rng.randrange(len(ids) + 1)
            change = rng.randrange(4)
            if change == 0:
                ids[place:place] = [rng.randrange(self._size)]
            elif change == 1:
                del ids[place : place + rng.randint(1, 6)]
            elif change == 2:
                ids[place : place + 1] = [rng.randrange(self._size)]
            else:
                ids = ids[:place] if rng.random() < 0.3 else ids
        return tuple(ids)

    def shutdown(self) -> None: ...


TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}
FLAT = {"type": "function", **ADD["function"]}
USER: Any = {"role": "user", "content": "1+2?"}


def chat(access: Any, stream: bool) -> list[Any]:
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key, max_retries=0)
    asked: dict[str, Any] = {"model": "policy", "tools": [ADD]}
    if stream:
        with client.chat.completions.stream(messages=[USER], **asked) as events:
            for _ in events:
                pass
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(messages=[USER], **asked).choices[0].message
    history: list[Any] = [USER, message.model_dump(exclude_none=True, exclude={"parsed"})]
    for call in message.tool_calls or []:
        assert isinstance(json.loads(call.function.arguments), dict)
        history.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    client.chat.completions.create(messages=[*history, USER], **asked)
    return history


def responses(access: Any, stream: bool) -> None:
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key, max_retries=0)
    asked: dict[str, Any] = {"model": "policy", "tools": [FLAT]}
    if stream:
        with client.responses.stream(input=[USER], **asked) as events:
            for _ in events:
                pass
            answer: Any = events.get_final_response()
    else:
        answer = client.responses.create(input=[USER], **asked)
    items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
    new: list[Any] = [USER, *items]
    for item in answer.output:
        if item.type == "function_call":
            assert isinstance(json.loads(item.arguments), dict)
            new.append({"type": "function_call_output", "call_id": item.call_id, "output": "3"})
    client.responses.create(input=[*new, USER], **asked)


def messages(access: Any, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=access.base_url, api_key=access.api_key, max_retries=0)
    asked: dict[str, Any] = {"model": "policy", "tools": [TOOL], "max_tokens": 100}
    if stream:
        with client.messages.stream(messages=[USER], **asked) as events:
            for _ in events:
                pass
            answer: Any = events.get_final_message()
    else:
        answer = client.messages.create(messages=[USER], **asked)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    assert all(isinstance(block.input, dict) for block in answer.content if block.type == "tool_use")
    said: Any = {
        "role": "assistant",
        "content": [block.model_dump(exclude_none=True) for block in answer.content] or ".",
    }
    onward: Any = {"role": "user", "content": results or "And?"}
    client.messages.create(messages=[USER, said, onward], **asked)


def completions(access: Any, stream: bool) -> None:
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key, max_retries=0)
    answer: Any = client.completions.create(model="policy", prompt="1+2?", stream=stream, logprobs=0)
    texts = [chunk.choices[0].text for chunk in answer] if stream else [answer.choices[0].text]
    assert all(isinstance(text, str) for text in texts)


@pytest.fixture(scope="module")
def begin() -> Iterator[Callable[..., LivePolicy]]:
    tokenizer = tokenizer_of_bytes()
    codec = codec_of(tokenizer)
    policies: list[GenerationPolicy] = []

    def new(seed: int, *, cuts: bool) -> LivePolicy:
        mutants: Any = NamedRequests(Mutants(tokenizer, seed, cuts=cuts))  # type: ignore[arg-type]
        workers = LocalWorkerGroup(lambda _: mutants, WorkerContext(), "mutants")
        policies.append(GenerationPolicy(workers, single_requests=RequestLimits(64, 60.0)))
        sampling = SamplingParams(max_new_tokens=1 << 14)
        sampler = Sampler(policies[-1], sampling, honours_clients=False, text=TokenizerText(tokenizer, codec))
        return LivePolicy(sampler, Conversation(codec, seed), episode_id=f"episode {seed}", limits=LIMITS, seed=seed)

    yield new
    for policy in policies:
        policy.shutdown()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("talk", [chat, responses, messages, completions])
def test_no_output_fails_a_client(gateway: Gateway, begin: Any, talk: Any, stream: bool) -> None:
    # The SDKs' own stream helpers raise for an answer that was cut, as they do with their services.
    policy = begin(11 + stream, cuts=not stream or talk is completions)
    access = gateway.open(policy)
    for _ in range(TALKS):
        talk(access, stream)
    traffic = gateway.close(access)
    assert (traffic.failures, traffic.refused, traffic.failure) == (0, 0, None)
    assert len(policy.calls) >= TALKS
    trained = sum(sum(part.response_mask) for part in sequences(policy.calls))
    assert trained == sum(len(call.completion.token_ids) for call in policy.calls)


TALKS = 40
"""Of each API and way; with two calls each, some 560 outputs in all (3,500 have been tried)."""
