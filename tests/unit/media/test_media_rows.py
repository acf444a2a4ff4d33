"""Rows and messages with images: what becomes of them, and what is refused."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

import pytest
from nemorl.config.models import PolicyConfig
from nemorl.errors import DataError
from nemorl.media import is_media, media_runs, shown_names
from nemorl_rl.chat.codec import Spoken, codec_of
from nemorl_rl.chat.conversation import Conversation, _is_same
from nemorl_rl.chat.media import shown_parts, with_media
from nemorl_rl.chat.messages import plain_messages
from nemorl_rl.data.encoding import encode_pair, encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import RewardFunction
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_rl.rollouts.prompts import to_prompt
from nemorl_rl.rollouts.rehearsal import rehearse
from nemorl_testing.seeing import drawing, tiny_sight
from PIL import Image
from recorded_messages import Raises

ONE, TWO = drawing(1).data, drawing(2).data
TEXT = {"type": "text", "text": "what?"}
ANSWER = {"role": "assistant", "content": "2"}


@cache
def tokenizer(family: str = "qwen2_5_vl") -> Tokenizer:
    return Tokenizer.of(PolicyConfig(model_name=str(tiny_sight(family))))


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def picture(data: bytes) -> dict[str, Any]:
    return {"type": "image", "image": data}


SAME: list[dict[str, Any]] = [
    {"prompt": asked(picture(ONE), TEXT)},
    {"messages": asked(picture(ONE), TEXT)},
    {"prompt": asked({"type": "image_url", "image_url": {"url": url(ONE)}}, TEXT)},
    {"prompt": asked({"type": "input_image", "image_url": url(ONE)}, TEXT)},
    {"prompt": asked({"type": "image", "image": {"bytes": ONE, "path": None}}, TEXT)},
    {"prompt": asked({"type": "image"}, TEXT), "images": [ONE]},
    {"prompt": asked({"type": "image", "text": None}, TEXT), "image": {"bytes": ONE, "path": "a.png"}},
    {"prompt": asked(TEXT), "image": ONE},
    {"prompt": "what?", "images": [ONE]},
]


@pytest.mark.parametrize("row", SAME)
def test_an_image_is_the_same_however_a_row_has_it(row: dict[str, Any]) -> None:
    prompt, first = to_prompt(row, 0, tokenizer()), to_prompt(SAME[0], 0, tokenizer())
    assert (prompt.token_ids, prompt.media, prompt.text) == (first.token_ids, first.media, "what?")
    assert len(prompt.media) == 1
    assert shown_names(prompt.token_ids) == {prompt.media[0].name}


def test_images_stand_in_the_order_of_their_parts() -> None:
    prompt = to_prompt({"prompt": asked(picture(TWO), TEXT, picture(ONE))}, 0, tokenizer())
    names = [prompt.token_ids[start] >> 14 for start, _ in media_runs(prompt.token_ids)]
    assert names == [item.name for item in prompt.media]
    other = to_prompt({"prompt": asked(picture(ONE), TEXT, picture(TWO))}, 0, tokenizer())
    assert [item.name for item in other.media] == names[::-1]


def test_the_settings_of_the_processor_are_part_of_an_items_name() -> None:
    policy = PolicyConfig(model_name=str(tiny_sight("qwen2_5_vl")), media={"processor": {"max_pixels": 784}})
    small, usual = to_prompt(SAME[0], 0, Tokenizer.of(policy)), to_prompt(SAME[0], 0, tokenizer())
    assert len(small.token_ids) < len(usual.token_ids)
    assert small.media[0].name != usual.media[0].name


def test_a_pillow_image_is_taken() -> None:
    prompt = to_prompt({"prompt": "what?", "image": Image.new("RGB", (56, 28))}, 0, tokenizer())
    assert sum(map(is_media, prompt.token_ids)) == 2  # 28 by 28 pixels are a token


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "gemma3"])
def test_of_a_demonstration_the_answer_alone_is_learnt(family: str) -> None:
    with_image = encode_row({**SAME[0], "response": "yes"}, tokenizer(family))
    prompt = to_prompt(SAME[0], 0, tokenizer(family))
    assert tuple(with_image.ids[: len(prompt.token_ids)]) == prompt.token_ids
    said = [token for token, learnt in zip(with_image.ids, with_image.mask, strict=True) if learnt]
    assert tokenizer(family).decode(said).strip() == "yes"
    assert with_image.mask == [False] * len(prompt.token_ids) + with_image.mask[len(prompt.token_ids) :]
    assert with_image.media == prompt.media


def test_a_pair_has_the_items_of_both_sides() -> None:
    reply = {"role": "assistant", "content": "a"}
    pair = encode_pair({**SAME[0], "chosen": [reply], "rejected": [{**reply, "content": "b"}]}, tokenizer())
    assert shown_names(pair.prompt) == {item.name for item in pair.media}


def test_an_observation_shows_an_image_as_the_template_does() -> None:
    seen = shown_parts([{"type": "text", "text": "look: "}, picture(ONE)], tokenizer())
    prompt = to_prompt(SAME[0], 0, tokenizer())
    start, end = next(media_runs(prompt.token_ids))
    around = prompt.token_ids[start - 1 : end + 1]  # <|vision_start|> … <|vision_end|>
    assert seen.ids == (*tokenizer().encode_observation("look: "), *around)
    assert seen.media == prompt.media


def test_a_conversation_goes_on_after_an_image_as_it_was_sampled() -> None:
    codec, answer = codec_of(tokenizer()), tuple(tokenizer().encode_observation("a cat<|im_end|>"))
    said = {"role": "assistant", "content": "a cat"}
    whole = plain_messages([*asked(picture(ONE), TEXT), said, *asked(picture(TWO))], codec.family)
    first = codec.render(whole[:1], ())
    more = codec.extend(Spoken(whole[:2], first, answer), whole[2:], ())
    assert more is not None
    assert (*first, *answer, *more) == codec.render(whole, ())


def test_an_answer_into_which_a_client_has_put_an_image_is_another() -> None:
    said = {"role": "assistant", "content": "a cat"}
    seen, same = ([{**said, "content": content}] for content in ([picture(ONE)], [{"type": "text", "text": "a cat"}]))
    found = [_is_same(said, plain_messages(echo, tokenizer().family)[0]) for echo in (seen, same)]
    assert found == [False, True]


def test_the_same_words_about_another_image_are_not_recognised() -> None:
    from nemorl.types import Completion

    conversation = Conversation(codec_of(tokenizer()), seed=0)
    prompt = conversation.prompt(asked(picture(ONE), TEXT))
    answer = tuple(tokenizer().encode_observation("odd  spelling<|im_end|>"))
    reply = conversation.reply(prompt, Completion(answer, (0.0,) * len(answer), "stop"))
    again = conversation.prompt([*asked(picture(ONE), TEXT), reply.message, *asked(TEXT)])
    assert again.token_ids[: len(prompt.token_ids) + len(answer)] == (*prompt.token_ids, *answer)
    other = conversation.prompt([*asked(picture(TWO), TEXT), reply.message, *asked(TEXT)])
    assert shown_names(other.token_ids) == {other.media[0].name} != shown_names(prompt.token_ids)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": asked({"type": "image"}, TEXT)}, "more places for images"),
        ({"prompt": asked({"type": "image"}, {"type": "image"}), "images": [ONE]}, "more places for images"),
        ({"prompt": asked({"type": "image"}), "images": [ONE, TWO]}, "more images or sounds than"),
        ({"prompt": "what?", "image": "http://example.org/a.png"}, "no data URL"),
        ({"prompt": "what?", "image": "file:///etc/passwd"}, "no data URL"),
        ({"prompt": "what?", "image": b"no image"}, "no image that can be read"),
        ({"prompt": "what?", "image": 7}, "an image is a int"),
        ({"prompt": "what?", "video": [ONE]}, "`video` column"),
        ({"prompt": asked(picture(ONE), {"type": "text", "text": "<|image_pad|>"})}, "placeholders of"),
        ({"prompt": "what?", "audio": b"RIFF"}, "takes image, not audio"),
    ],
)
def test_what_cannot_be_shown_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        to_prompt(row, 0, tokenizer())


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "system", "content": "Look."}], "image": ONE},
        {"chosen": [*asked(TEXT), ANSWER], "rejected": [*asked(TEXT), ANSWER], "images": [ONE]},
    ],
)
def test_an_item_that_no_message_of_a_user_can_hold_is_not_lost(row: dict[str, Any], raises: Raises) -> None:
    with raises(DataError, "user"):
        with_media(row, tokenizer().family)


def test_an_item_may_stand_alone_in_a_message() -> None:
    row = with_media({"prompt": [{"role": "user", "content": None}], "image": ONE}, tokenizer().family)
    assert [part["type"] for part in row["prompt"][0]["content"]] == ["image"]


@pytest.mark.parametrize("row", SAME)
def test_a_model_of_text_alone_refuses_images(row: dict[str, Any], tmp_path: Any, raises: Raises) -> None:
    policy = PolicyConfig(model_name=str(write_tiny_model(tmp_path, hidden_size=32)))
    with raises(DataError):
        to_prompt(row, 0, Tokenizer.of(policy))


def test_a_reward_is_tried_on_a_row_with_an_image_before_the_model_is_known() -> None:
    seen: list[str] = []

    def reward(prompt: str, response: str) -> float:
        seen.append(prompt)
        return 1.0

    rehearse(RewardFunction(reward), {"prompt": "how many?", "image": drawing(1).data, "answer": "2"}, pytest.fail)
    assert seen == ["how many?"]
