"""Images and sounds by the clients of all APIs, to a policy that sees: its prompts hold their tokens, turn by turn."""

from __future__ import annotations

import gc
import io
import random
import re
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from nemorl.config.load import validate
from nemorl.config.models import GenerationConfig
from nemorl.media import media_runs
from nemorl_agents.gateway.gateway import Gateway, GatewayOptions
from nemorl_agents.gateway.model_server import served
from nemorl_rl.agents.contract import EpisodeClosedError, EpisodeLimits
from nemorl_rl.agents.policy import LivePolicy, Sampler
from nemorl_rl.agents.record import sequences
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.media import process_items
from nemorl_rl.chat.messages import plain_messages
from nemorl_rl.chat.text import TokenizerText
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.placement.engines import standalone_generation
from nemorl_rl.rollouts.prompts import to_prompt
from nemorl_testing.seeing import drawing, tiny_sight, tune
from pictured_talks import (
    CALL,
    LIMITS,
    TALKS,
    Chat,
    Messages,
    Responses,
    base64_of,
    live,
    policy_config,
    saying_sampler,
    url_of,
)
from PIL import Image

ONE, TWO = drawing(1).data, drawing(2).data
ROW = [{"role": "user", "content": [{"type": "image", "image": ONE}, {"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.of(policy_config())


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> Iterator[Sampler]:
    """Of the tiny model itself."""
    config = validate(GenerationConfig, {"backend": "hf", "max_new_tokens": 8}, source="test")
    engine = standalone_generation(config, policy_config())
    text = TokenizerText(tokenizer, codec_of(tokenizer))
    yield Sampler(engine, config.sampling(), honours_clients=True, text=text)
    engine.shutdown()


def names(ids: tuple[int, ...]) -> list[int]:
    """Of the items in a prompt, in order."""
    return [ids[start] >> 14 for start, _ in media_runs(ids)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("talk", TALKS)
def test_turns_about_an_image_are_one_sequence_of_what_was_sampled(
    gateway: Gateway, sampler: Sampler, tokenizer: Tokenizer, talk: Any, stream: bool
) -> None:
    policy = live(sampler, tokenizer)
    access = gateway.open(policy)
    talking = talk(access)
    talking.user(ONE, "what?")
    talking.ask(stream=stream)
    talking.user(ONE, "and the other?", TWO)
    talking.ask(stream=stream)
    assert gateway.close(access).refused == 0
    first, second = policy.calls
    prompt = to_prompt({"prompt": ROW}, 0, tokenizer)
    assert first.prompt_ids == prompt.token_ids  # of a row of the same content
    assert first.media == prompt.media
    said = (*first.prompt_ids, *first.completion.token_ids)
    assert second.prompt_ids[: len(said)] == said
    one, other = prompt.media[0].name, second.media[2].name
    assert names(second.prompt_ids) == [one, one, other]
    assert second.realigned_tokens == 0
    [branch] = sequences(policy.calls)
    assert sum(branch.response_mask) == len(first.completion.token_ids) + len(second.completion.token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("talk", TALKS)
def test_what_a_tool_shows_stands_behind_its_call(
    gateway: Gateway, tokenizer: Tokenizer, talk: Any, stream: bool
) -> None:
    with saying_sampler(tokenizer, CALL, "a  cat") as sampler:
        policy = live(sampler, tokenizer)
        access = gateway.open(policy)
        talking = talk(access)
        talking.user("look!")
        [call] = talking.ask(stream=stream, tools=[talk.TOOL])
        talking.answered(call, "seen: ", ONE)
        assert talking.ask(stream=stream, tools=[talk.TOOL]) == []
        talking.user(ONE, "again?")
        [call] = talking.ask(stream=stream, tools=[talk.TOOL])
        talking.answered(call, TWO)
        talking.ask(stream=stream, tools=[talk.TOOL])
        assert gateway.close(access).refused == 0
    [branch] = sequences(policy.calls)
    asked = policy.calls[-1]
    one, other = asked.media[0].name, asked.media[2].name
    assert names(asked.prompt_ids) == [one, one, other]
    assert sum(branch.response_mask) == sum(len(each.completion.token_ids) for each in policy.calls)
    shown = tokenizer.decode(policy.calls[1].prompt_ids)
    assert shown.endswith("tool\nseen: \nassistant\n")


@pytest.mark.parametrize("talk", TALKS)
def test_a_history_that_shows_an_image_again_and_again_holds_it_once(tokenizer: Tokenizer, talk: Any) -> None:
    """Ten turns after the second send it 3 + 4 + … + 12 = 75 times. What grows besides is token ids."""
    file = io.BytesIO()
    Image.frombytes("RGB", (200, 200), random.Random(0).randbytes(200 * 200 * 3)).save(file, "PNG")
    picture = file.getvalue()
    assert len(picture) > 120_000
    with Gateway() as gateway, saying_sampler(tokenizer, "a cat") as sampler:
        policy = live(sampler, tokenizer)
        talking = talk(gateway.open(policy))

        def turn() -> None:
            talking.user(picture, "and?")
            talking.ask()

        def held() -> int:
            """Bytes, but for those of the client's own history."""
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - sum(len(str(message)) for message in talking.history)

        turn()
        tracemalloc.start()
        turn()
        before = held()
        for _ in range(10):
            turn()
        grown = held() - before
        tracemalloc.stop()
    assert len({id(item.data) for call in policy.calls for item in call.media}) == 1
    assert grown < 4 * len(picture)


@pytest.mark.parametrize("talk", TALKS)
def test_a_prompt_without_room_for_an_answer_is_refused_and_its_item_is_whole(
    gateway: Gateway, sampler: Sampler, tokenizer: Tokenizer, talk: Any
) -> None:
    prompt = to_prompt({"prompt": ROW}, 0, tokenizer)
    for room in (-1, 0, 1):
        limits = EpisodeLimits(len(prompt.token_ids) + room, 8, 10, 600.0)
        policy = live(sampler, tokenizer, limits)
        talking = talk(gateway.open(policy))
        talking.user(ONE, "what?")
        if room > 0:
            talking.ask()
            [call] = policy.calls
            assert (call.prompt_ids, len(call.completion.token_ids)) == (prompt.token_ids, 1)
            continue
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            talking.ask()
        assert str(limits.max_sequence_tokens) in str(caught.value)
        assert policy.calls == []


@pytest.mark.parametrize("talk", TALKS)
def test_of_a_prompt_that_is_too_long_the_rest_is_not_looked_at(
    gateway: Gateway, tokenizer: Tokenizer, talk: Any
) -> None:
    """A drawing is 6 tokens. Of three in a prompt of at most 15 the third is too much; what is behind it is damaged."""
    limits = EpisodeLimits(15, 8, 10, 600.0)
    with saying_sampler(tokenizer, "a cat") as sampler:
        talking = talk(gateway.open(live(sampler, tokenizer, limits)))
        talking.user(ONE, ONE, ONE, b"damaged")
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            talking.ask()
        assert "18 tokens" in str(caught.value)
        if talk is Messages:
            with pytest.raises(anthropic.BadRequestError) as caught:
                talking.client(anthropic.Anthropic).messages.count_tokens(model="policy", messages=talking.history)
            assert "18 tokens" in str(caught.value)


def test_others_are_answered_while_an_image_is_processed(gateway: Gateway, tokenizer: Tokenizer) -> None:
    assert tokenizer.family is not None
    with saying_sampler(tokenizer, "a cat") as sampler:
        shown, told = (Chat(gateway.open(live(sampler, tokenizer))) for _ in range(2))
        shown.user(drawing(99).data)
        told.user("what?")
        asking = threading.Thread(target=shown.ask)
        with tokenizer.family._items._making:  # as if it took that long
            asking.start()
            told.ask()
            assert len(told.history) == 2
            assert len(shown.history) == 1
        asking.join()
    assert len(shown.history) == 2


def test_of_an_episode_that_has_ended_no_more_images_are_processed(tokenizer: Tokenizer) -> None:
    parts = [{"type": "image", "image": one} for one in (ONE, TWO, b"damaged")]
    asked: list[Any] = [{"role": "user", "content": parts}]
    plain, asks = plain_messages(asked, tokenizer.family), count()

    def require_wanted() -> None:
        if next(asks) == 2:
            raise EpisodeClosedError("it has ended")

    with pytest.raises(EpisodeClosedError):
        process_items(plain, tokenizer.family, 1000, require_wanted)


def refused(gateway: Gateway, policy: LivePolicy, api: str, part: Any) -> tuple[str, Any]:
    """The error's message and the place that it names."""
    access = gateway.open(policy)
    message: Any = [{"role": "user", "content": [part]}]
    client: Any = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key)
    if api == "messages":
        client = anthropic.Anthropic(base_url=access.base_url, api_key=access.api_key)
    ask = {
        "chat": lambda: client.chat.completions.create(model="policy", messages=message),
        "responses": lambda: client.responses.create(model="policy", input=message),
        "messages": lambda: client.messages.create(model="policy", max_tokens=5, messages=message),
    }[api]
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
        ask()
    traffic = gateway.close(access)
    assert (traffic.requests, traffic.refused, traffic.failures) == (1, 1, 0)
    assert policy.calls == []
    told: Any = caught.value
    if api != "messages":
        return told.body["message"], told.body["param"]
    error = told.body["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"], error["message"].partition(":")[0]


def by_url(api: str, url: str) -> Any:
    return {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "responses": {"type": "input_image", "image_url": url},
        "messages": {"type": "image", "source": {"type": "url", "url": url}},
    }[api]


def by_data(api: str, data: bytes, media_type: str) -> Any:
    if api == "messages":
        return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": base64_of(data)}}
    return by_url(api, f"data:{media_type};base64,{base64_of(data)}")


PLACES = {"chat": "image_url.url", "responses": "image_url", "messages": "source.url"}
FIRST = {"chat": "messages[0]", "responses": "input[0]", "messages": "messages[0]"}


@pytest.mark.parametrize("api", PLACES)
@pytest.mark.parametrize("url", ["https://example.org/a.png", "file:///etc/passwd", "/etc/passwd", ""])
def test_nothing_is_fetched(gateway: Gateway, sampler: Sampler, tokenizer: Tokenizer, api: str, url: str) -> None:
    message, place = refused(gateway, live(sampler, tokenizer), api, by_url(api, url))
    assert place == f"{FIRST[api]}.content[0].{PLACES[api]}"
    assert repr(url) in message


@pytest.mark.parametrize("api", PLACES)
@pytest.mark.parametrize(
    ("data", "media_type", "told"),
    [
        (ONE[:200], "image/png", "200 bytes"),
        (b"no image", "image/png", "8 bytes"),
        (b"", "image/jpeg", "0 bytes"),
        (b"%PDF-1.7", "application/pdf", "application/pdf"),
        (tune(1).data, "audio/wav", "audio"),
    ],
)
def test_what_is_no_image_is_the_clients_fault(
    gateway: Gateway, sampler: Sampler, tokenizer: Tokenizer, api: str, data: bytes, media_type: str, told: str
) -> None:
    message, _ = refused(gateway, live(sampler, tokenizer), api, by_data(api, data, media_type))
    assert told in message


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_model_that_does_not_hear_says_so(gateway: Gateway, sampler: Sampler, tokenizer: Tokenizer, api: str) -> None:
    part = {"type": "input_audio", "input_audio": {"data": base64_of(tune(1).data), "format": "wav"}}
    message, _ = refused(gateway, live(sampler, tokenizer), api, part)
    assert "audio" in message


@pytest.mark.parametrize("api", PLACES)
def test_a_model_of_text_alone_says_so(gateway: Gateway, tokenizer: Tokenizer, api: str) -> None:
    blind = Tokenizer(tokenizer.inner)  # without the model's config it reads text alone
    with saying_sampler(blind, "a cat") as sampler:
        message, _ = refused(gateway, live(sampler, blind), api, by_data(api, ONE, "image/png"))
    assert "docs/media.md" in message


def test_a_body_with_too_large_images_is_told_the_limit_and_the_setting(sampler: Sampler, tokenizer: Tokenizer) -> None:
    limit = 2 * len(url_of(ONE))  # of two images, without the JSON around them: one is let through
    with Gateway(GatewayOptions(max_body_bytes=limit)) as gateway:
        talking = Chat(gateway.open(live(sampler, tokenizer)))
        talking.user(ONE)
        talking.ask()
        talking.user(ONE)
        with pytest.raises(openai.APIStatusError) as caught:
            talking.ask()
    assert caught.value.status_code == 413
    assert f"{limit:,} bytes" in str(caught.value)
    assert "environment.gateway.max_body_mib" in str(caught.value)


@pytest.mark.parametrize("talk", [Chat, Responses])
def test_a_model_that_hears_is_given_a_sound(gateway: Gateway, talk: Any) -> None:
    hearing = Tokenizer.of(policy_config(model_name=str(tiny_sight("qwen2_audio")), tokenizer={}))
    sound = tune(1)
    part = {"type": "input_audio", "input_audio": {"data": base64_of(sound.data), "format": "wav"}}
    row = {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": sound.data}]}]}
    with saying_sampler(hearing, "a bell") as sampler:
        policy = live(sampler, hearing, LIMITS)
        talking = talk(gateway.open(policy))
        talking.history.append({"role": "user", "content": [part]})
        talking.ask()
    prompt = to_prompt(row, 0, hearing)
    assert policy.calls[0].prompt_ids == prompt.token_ids
    assert names(prompt.token_ids) == [prompt.media[0].name]


def test_the_example_of_the_page_runs(
    gateway: Gateway, sampler: Sampler, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs/agents/gateway.md").read_text()
    [example] = re.findall(r"^## Images and sounds\n.*?^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    policy = live(sampler, tokenizer)
    for name, value in gateway.open(policy).variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("screen.png").write_bytes(ONE)
    names: dict[str, Any] = {}
    exec(compile(example, "gateway.md", "exec", dont_inherit=True), names)
    assert names["answer"].usage.input_tokens == len(policy.calls[0].prompt_ids)
    assert len(policy.calls[0].media) == 1


def test_a_served_model_sees_and_counts_what_it_is_shown() -> None:
    options = {"backend": "hf", "temperature": 0.0, "max_new_tokens": 8}
    folder = str(tiny_sight("qwen2_5_vl"))
    with served(folder, GatewayOptions(models=("policy",)), options, max_sequence_tokens=512) as access:
        talking, client = Messages(access), anthropic.Anthropic(base_url=access.base_url, api_key=access.api_key)
        talking.user(ONE, "what?")
        counted = client.messages.count_tokens(model="policy", messages=talking.history)
        talking.ask()
        seen = client.messages.create(model="policy", messages=talking.history[:1], max_tokens=8)
        talking.user(TWO, "and that?")
        talking.ask()
    ids = to_prompt({"prompt": ROW}, 0, Tokenizer.of(policy_config(tokenizer={}))).token_ids
    assert counted.input_tokens == seen.usage.input_tokens == len(ids)
