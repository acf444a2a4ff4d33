"""``POST /v1/completions``: text or tokens to be gone on with, without a chat template."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from nemorl.types import Completion
from nemorl_rl.chat.text import TextCoder

from nemorl_agents.gateway.apis.base import ErrorWords, OpenAIErrors, all_of, cut_at, event, fingerprint, new_id, pieces
from nemorl_agents.gateway.apis.chat import usage_of, wants_usage
from nemorl_agents.gateway.body import call_options, list_at, samples, text_at, whole_at
from nemorl_agents.gateway.calls import Answer
from nemorl_agents.gateway.episodes import OpenEpisode
from nemorl_agents.gateway.errors import bad_field
from nemorl_agents.gateway.fields import Field, honoured, ignored, refused

MOST_PROMPTS = 128


class Completions:
    """OpenAI's completions."""

    path: ClassVar[str] = "/v1/completions"
    errors: ClassVar[ErrorWords] = OpenAIErrors()
    fields: ClassVar[Mapping[str, Field]] = {
        "model": honoured("one of the served names; echoed"),
        "prompt": honoured("a text, texts, token ids, or several lists of them"),
        "max_tokens": honoured("bounded by the run's own limit and the room in the context; 16 where it is left out"),
        "temperature": honoured("0 to 2, in serving and evaluation; in training it is the run's"),
        "top_p": honoured("as `temperature`"),
        "top_k": honoured("as `temperature`; 0 and -1 keep all tokens", 0, -1),
        "stop": honoured("up to 16 strings; they are not part of the answer"),
        "seed": honoured("in place of the episode's"),
        "n": honoured("up to 128 answers to each prompt, each a call of the policy"),
        "stream": honoured("cut from the finished answer"),
        "stream_options": honoured("`include_usage`"),
        "logprobs": honoured("0: of the sampled tokens. More are refused: others are not known"),
        "echo": refused("put the prompt before the answer in the agent", False),
        "suffix": refused("leave it out: the policy goes on from the prompt"),
        "best_of": refused("ask for `n` and choose", 1),
        "frequency_penalty": refused("leave it out: penalties would change what is sampled", 0),
        "presence_penalty": refused("leave it out: penalties would change what is sampled", 0),
        "logit_bias": refused("leave it out: it would change what is sampled", {}),
        "user": ignored("the key says who asks"),
    }

    async def answer(self, body: Mapping[str, Any], episode: OpenEpisode) -> Answer:
        body = {"max_tokens": 16, **body}
        text = episode.text
        prompts = _prompts(body.get("prompt"), text)
        wants_logprobs = "logprobs" in body and whole_at(body["logprobs"], "logprobs", 0, 0) == 0
        count = samples(body)
        options = [call_options(body, limits=("max_tokens",), stop="stop", number=i) for i in range(count)]
        says_usage = wants_usage(body)
        works = [episode.policy.complete(ids, options=one) for ids in prompts for one in options]
        completions = await all_of(works)
        choices = [_choice(completion, text, options[0].stop, wants_logprobs) for completion in completions]
        usage = usage_of(sum(map(len, prompts)), sum(len(one.token_ids) for one in completions))
        shared = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body["model"],
            "system_fingerprint": fingerprint(completions[0]),
        }
        payload = {**shared, "choices": [one.whole(index) for index, one in enumerate(choices)], "usage": usage}
        episode.answers.add(shared["id"], completions)
        return Answer(payload, lambda: _events(shared, choices, usage if says_usage else None))


@dataclass(frozen=True, slots=True)
class _Choice:
    text: str
    finish_reason: str
    logprobs: Mapping[str, Any] | None

    def whole(self, index: int) -> Mapping[str, Any]:
        return {"index": index, "text": self.text, "logprobs": self.logprobs, "finish_reason": self.finish_reason}


def _prompts(value: Any, text: TextCoder) -> list[tuple[int, ...]]:
    """The tokens of each prompt."""
    if isinstance(value, str):
        return [tuple(text.encode(value))]
    listed = list_at(value, "prompt")
    if not listed or (len(listed) > MOST_PROMPTS and not isinstance(listed[0], int)):
        raise bad_field("prompt", f"holds {len(listed)} prompts", fix=f"send 1 to {MOST_PROMPTS}")
    if isinstance(listed[0], int):
        return [_token_ids(listed, "prompt", text.vocabulary)]
    if isinstance(listed[0], str):
        return [tuple(text.encode(text_at(one, f"prompt[{i}]"))) for i, one in enumerate(listed)]
    size = text.vocabulary
    return [_token_ids(list_at(one, f"prompt[{i}]"), f"prompt[{i}]", size) for i, one in enumerate(listed)]


def _token_ids(listed: Sequence[Any], place: str, vocabulary: int) -> tuple[int, ...]:
    if not listed:
        raise bad_field(place, "holds no token")
    return tuple(whole_at(one, f"{place}[{i}]", 0, vocabulary - 1) for i, one in enumerate(listed))


def _choice(completion: Completion, text: TextCoder, stops: Sequence[str], wants_logprobs: bool) -> _Choice:
    said, _ = cut_at(text.decode(completion.token_ids), stops)
    reason = "length" if completion.finish_reason == "length" else "stop"
    return _Choice(said, reason, _logprobs(completion, text) if wants_logprobs else None)


def _logprobs(completion: Completion, text: TextCoder) -> Mapping[str, Any]:
    tokens = [text.token(token_id) for token_id in completion.token_ids]
    starts = [*accumulate(map(len, tokens), initial=0)][:-1]
    return {
        "tokens": tokens,
        "token_logprobs": [*completion.logprobs],
        "top_logprobs": None,
        "text_offset": starts,
    }


def _events(shared: Mapping[str, Any], choices: Sequence[_Choice], usage: Mapping[str, int] | None) -> Iterator[bytes]:
    chunk = {**shared, **({"usage": None} if usage else {})}
    for index, choice in enumerate(choices):
        for piece in pieces(choice.text):
            part = {"index": index, "text": piece, "logprobs": None, "finish_reason": None}
            yield event({**chunk, "choices": [part]})
        yield event({**chunk, "choices": [{**choice.whole(index), "text": ""}]})
    if usage:
        yield event({**chunk, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"
