"""Images and sounds that nobody means: damaged files, wrong types and values in any place are the API's error, and
never a failure of the gateway. The policy's prompts are those of real families; what it says is made up."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nemorl_agents.gateway.gateway import GatewayOptions
from nemorl_rl.agents.policy import LivePolicy
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_testing.seeing import drawing, tiny_sight, tune
from pictured_talks import base64_of, live, policy_config, saying_sampler, url_of
from PIL import Image
from scripted_policy import calling
from test_odd_bodies import ODD, changed, places

TOOL = {"name": "look", "parameters": {"type": "object"}}
FORMATS = {"png": {}, "jpeg": {}, "gif": {}, "webp": {}, "bmp": {}, "tiff": {"compression": "tiff_lzw"}}
TYPES = (
    "image/png",
    "image/jpeg",
    "IMAGE/PNG",
    "image/svg+xml",
    "image/",
    "text/plain",
    "audio/wav",
    "video/mp4",
    "x",
    "",
)
KINDS = ("image", "image_url", "input_image", "input_audio", "audio_url", "text", "file", "document", "video", "x")
STARTS = ("https://example.org/", "file:///", "data:", "data:image/png,", "data:image/png;base64", "data:;base64,", " ")
TRIES = 600
"""Bodies of each API to the model that all are tried on; of other families, a third"""


def picture(form: str = "png") -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(drawing(1, 60, 40).data)).save(file, form, **FORMATS[form])
    return file.getvalue()


def chat(item: bytes) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url_of(item), "detail": "low"}}
    return {
        "model": "policy",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t"}, image]},
            {"role": "assistant", "content": None, "tool_calls": [calling("look", "{}")]},
            {"role": "tool", "tool_call_id": "call_1", "content": [image, {"type": "text", "text": "t"}]},
        ],
        "tools": [{"type": "function", "function": TOOL}],
    }


def responses(item: bytes) -> dict[str, Any]:
    image = {"type": "input_image", "image_url": url_of(item), "detail": "auto"}
    return {
        "model": "policy",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}, image]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [image]},
        ],
        "tools": [{"type": "function", **TOOL}],
    }


def messages(item: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(item)}
    image = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    return {
        "model": "policy",
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": [image, {"type": "text", "text": "t"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}, image]},
        ],
        "tools": [{"name": "look", "input_schema": TOOL["parameters"]}],
    }


def sound(item: bytes) -> dict[str, Any]:
    heard = {"type": "input_audio", "input_audio": {"data": base64_of(item), "format": "wav"}}
    return {"model": "policy", "messages": [{"role": "user", "content": [heard, {"type": "text", "text": "t"}]}]}


APIS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
}


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A file with bytes changed, left out, added or moved, most of all in its head."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = int(len(found) * chance.random() ** 3)
        match chance.randrange(6):
            case 0:
                del found[place:]
            case 1:
                del found[place : place + chance.randint(1, 9)]
            case 2:
                found[place:place] = chance.randbytes(chance.randint(1, 9))
            case 3:
                found[place : place + 4] = chance.choice([bytes(4), b"\xff" * 4, b"\0\0\1\0", b"\x7f\xff\xff\xff"])
            case 4:
                found[place : place + 1] = chance.randbytes(1)
            case _:
                found += found[place:]
    return bytes(found)


def odd_text(text: str, chance: random.Random) -> str:
    """What stands where a file's data or type is told, otherwise."""
    match chance.randrange(5):
        case 0:
            return text[: chance.randrange(len(text) + 1)]
        case 1:
            place = chance.randrange(len(text) + 1)
            return text[:place] + chance.choice(["=", "\n", "é", "-", "\0", "%41", "\U0001f600"]) + text[place:]
        case 2:
            return chance.choice(STARTS) + text
        case 3:
            return chance.choice(TYPES + KINDS)
        case _:
            return text.replace("png", chance.choice(["jpeg", "png;a=b", "gif;base64", "p/n/g"]), 1)


def odd_body(make: Callable[[bytes], dict[str, Any]], files: list[bytes], chance: random.Random) -> Any:
    """A body with a file that is damaged or not, and with up to two values changed."""
    item = chance.choice(files)
    body: Any = make(damaged(item, chance) if chance.random() < 0.6 else item)
    for _ in range(chance.choice([0, 1, 1, 2])):
        found = [path for path in places(body) if path[0] in ("messages", "input")]
        path = chance.choice(found)
        inner: Any = body
        for key in path:
            inner = inner[key]
        if isinstance(inner, str) and chance.random() < 0.7:
            body = changed(body, path, odd_text(inner, chance))
        elif isinstance(inner, list) and inner and chance.random() < 0.5:
            body = changed(body, path, [*inner, copy.deepcopy(chance.choice(inner))])
        else:
            body = changed(body, path, chance.choice([*ODD, *KINDS]))
    return body


@pytest.fixture
def policy_of() -> Iterator[Callable[[str], LivePolicy]]:
    samplers = []

    def new(family: str) -> LivePolicy:
        own: dict[str, Any] = {} if family == "qwen2_5_vl" else {"tokenizer": {}}
        tokenizer = Tokenizer.of(policy_config(model_name=str(tiny_sight(family)), **own))
        samplers.append(saying_sampler(tokenizer, "a cat"))
        return live(samplers[-1].__enter__(), tokenizer)

    yield new
    for sampler in samplers:
        sampler.__exit__(None, None, None)


def attack(talk: Any, path: str, make: Any, files: list[bytes], tries: int) -> Counter[int]:
    """Statuses of the answers, and how often each was given."""
    chance, found = random.Random(f"{path} {tries}"), Counter[int]()
    for _ in range(tries):
        body = odd_body(make, files, chance)
        answer = talk.post(path, body)
        assert answer.status_code in (200, 400), (answer.text, str(body)[:3000])
        assert answer.status_code == 200 or answer.json()["error"]["message"]
        found[answer.status_code] += 1
    assert talk.episode.traffic.failures == 0
    return found


@pytest.mark.parametrize("path", APIS)
def test_no_image_makes_the_gateway_fail(open_talk: Any, policy_of: Any, path: str) -> None:
    talk = open_talk(policy_of("qwen2_5_vl"), GatewayOptions())
    assert talk.post(path, APIS[path](picture())).status_code == 200
    found = attack(talk, path, APIS[path], [*map(picture, FORMATS)], TRIES)
    assert min(found[200], found[400]) > TRIES / 20  # neither is refused as a whole, nor let through


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3", "llava", "gemma3"])
def test_no_image_makes_another_family_fail(open_talk: Any, policy_of: Any, family: str) -> None:
    def shown(item: bytes) -> dict[str, Any]:
        body = chat(item)
        return {"model": "policy", "messages": body["messages"][:1]}  # their templates know no tools

    talk = open_talk(policy_of(family), GatewayOptions())
    attack(talk, "/v1/chat/completions", shown, [*map(picture, FORMATS)], TRIES // 3)


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni_thinker"])
def test_no_sound_makes_the_gateway_fail(open_talk: Any, policy_of: Any, family: str) -> None:
    talk = open_talk(policy_of(family), GatewayOptions())
    assert talk.post("/v1/chat/completions", sound(tune(1, 0.05).data)).status_code == 200
    attack(talk, "/v1/chat/completions", sound, [tune(1, 0.05).data, tune(2, 0.0).data, b""], TRIES // 3)
