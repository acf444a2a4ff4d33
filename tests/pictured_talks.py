"""A policy that sees, behind the gateway, and how each API's own client shows it images."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ClassVar

import anthropic
import openai
from nemorl.config.models import PolicyConfig
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl_agents.gateway.access import Access
from nemorl_rl.agents.contract import EpisodeLimits
from nemorl_rl.agents.policy import LivePolicy, Sampler
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.chat.text import TokenizerText
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests
from nemorl_testing.seeing import tiny_sight

LIMITS = EpisodeLimits(max_sequence_tokens=1 << 20, max_new_tokens=8, max_calls=1 << 20, timeout_s=600.0)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% elif c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that shows tools, their calls, and images in what tools answer"""
LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def policy_config(**fields: Any) -> PolicyConfig:
    """Of the tiny Qwen2.5-VL, whose template knows tools."""
    own = {"max_sequence_tokens": 4096, "tokenizer": {"chat_template": TEMPLATE}}
    return PolicyConfig(**{"model_name": str(tiny_sight("qwen2_5_vl")), **own, **fields})


def live(sampler: Sampler, tokenizer: Tokenizer, limits: EpisodeLimits = LIMITS) -> LivePolicy:
    """A policy of an episode of its own."""
    conversation = Conversation(codec_of(tokenizer), 0)
    return LivePolicy(sampler, conversation, episode_id="episode 0.0", limits=limits, seed=0)


class Says:
    """An engine that says one text after the other, again and again."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._answers = [tuple(tokenizer.encode_observation(text + "<|im_end|>")) for text in texts]
        self._count = 0

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        ids = self._answers[self._count % len(self._answers)]
        self._count += 1
        answer: Future[list[Completion]] = Future()
        answer.set_result([Completion(ids, (-0.5,) * len(ids), "stop", (1,))])
        return answer

    def shutdown(self) -> None: ...


@contextmanager
def saying_sampler(tokenizer: Tokenizer, *texts: str) -> Iterator[Sampler]:
    """A sampler whose engine says these texts."""
    says: Any = NamedRequests(Says(tokenizer, texts))  # type: ignore[arg-type]
    workers = LocalWorkerGroup(lambda _: says, WorkerContext(), "says")
    generation = GenerationPolicy(workers, single_requests=RequestLimits(64, 60.0))
    text = TokenizerText(tokenizer, codec_of(tokenizer))
    yield Sampler(generation, SamplingParams(max_new_tokens=64), honours_clients=False, text=text)
    generation.shutdown()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64_of(data)}"


class Talk:
    """A conversation by an API's own client, which sends the whole history each time."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.history: list[Any] = []

    def client(self, kind: Any) -> Any:
        is_openai = kind is openai.OpenAI
        base_url = self.access.openai_base_url if is_openai else self.access.base_url
        return kind(base_url=base_url, api_key=self.access.api_key, max_retries=0)


class Chat(Talk):
    """OpenAI's chat completions."""

    TOOL: ClassVar[Any] = {"type": "function", "function": LOOK}

    @staticmethod
    def parts(*contents: str | bytes) -> list[Any]:
        return [
            {"type": "text", "text": one}
            if isinstance(one, str)
            else {"type": "image_url", "image_url": {"url": url_of(one), "detail": "auto"}}
            for one in contents
        ]

    def user(self, *contents: str | bytes) -> None:
        self.history.append({"role": "user", "content": self.parts(*contents)})

    def ask(self, *, stream: bool = False, **fields: Any) -> list[str]:
        """The ids of the calls that it makes."""
        client, asked = self.client(openai.OpenAI), {"model": "policy", "messages": self.history, **fields}
        if stream:
            message = self._streamed(client.chat.completions.create(**asked, stream=True))
        else:
            message = client.chat.completions.create(**asked).choices[0].message.model_dump(exclude_none=True)
        self.history.append(message)
        return [call["id"] for call in message.get("tool_calls") or []]

    @staticmethod
    def _streamed(chunks: Any) -> dict[str, Any]:
        """The message that pieces add up to; the client's own helper refuses one that was cut."""
        text, calls = "", dict[int, dict[str, Any]]()
        for delta in (chunk.choices[0].delta for chunk in chunks):
            text += delta.content or ""
            for piece in delta.tool_calls or []:
                call = calls.setdefault(
                    piece.index, {"id": piece.id, "type": "function", "function": {"arguments": ""}}
                )
                call["function"]["name"] = piece.function.name or call["function"]["name"]
                call["function"]["arguments"] += piece.function.arguments or ""
        return {"role": "assistant", "content": text, **({"tool_calls": [*calls.values()]} if calls else {})}

    def answered(self, call: str, *contents: str | bytes) -> None:
        self.history.append({"role": "tool", "tool_call_id": call, "content": self.parts(*contents)})


class Responses(Talk):
    """OpenAI's responses."""

    TOOL: ClassVar[Any] = {"type": "function", **LOOK}

    @staticmethod
    def parts(*contents: str | bytes) -> list[Any]:
        return [
            {"type": "input_text", "text": one}
            if isinstance(one, str)
            else {"type": "input_image", "image_url": url_of(one), "detail": "low"}
            for one in contents
        ]

    def user(self, *contents: str | bytes) -> None:
        self.history.append({"role": "user", "content": self.parts(*contents)})

    def ask(self, *, stream: bool = False, **fields: Any) -> list[str]:
        client, asked = self.client(openai.OpenAI), {"model": "policy", "input": self.history, **fields}
        if stream:
            *_, last = client.responses.create(**asked, stream=True)
            answer = last.response
        else:
            answer = client.responses.create(**asked)
        self.history += [one.model_dump(exclude_none=True) for one in answer.output]
        return [one.call_id for one in answer.output if one.type == "function_call"]

    def answered(self, call: str, *contents: str | bytes) -> None:
        self.history.append({"type": "function_call_output", "call_id": call, "output": self.parts(*contents)})


class Messages(Talk):
    """Anthropic's messages."""

    TOOL: ClassVar[Any] = {"name": "look", "input_schema": LOOK["parameters"]}

    @staticmethod
    def parts(*contents: str | bytes) -> list[Any]:
        source = {"type": "base64", "media_type": "image/png"}
        return [
            {"type": "text", "text": one}
            if isinstance(one, str)
            else {"type": "image", "source": {**source, "data": base64_of(one)}}
            for one in contents
        ]

    def user(self, *contents: str | bytes) -> None:
        self.history.append({"role": "user", "content": self.parts(*contents)})

    def ask(self, *, stream: bool = False, **fields: Any) -> list[str]:
        client = self.client(anthropic.Anthropic)
        asked = {"model": "policy", "max_tokens": 64, "messages": self.history, **fields}
        if stream:
            with client.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
        said = [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in answer.content]
        self.history.append({"role": "assistant", "content": said})
        return [block.id for block in answer.content if block.type == "tool_use"]

    def answered(self, call: str, *contents: str | bytes) -> None:
        result = {"type": "tool_result", "tool_use_id": call, "content": self.parts(*contents)}
        self.history.append({"role": "user", "content": [result]})


TALKS: tuple[Any, ...] = (Chat, Responses, Messages)
