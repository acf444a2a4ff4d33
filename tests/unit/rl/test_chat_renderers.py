"""The package ``renderers``, none of whose code is ours, says the same as ``TemplateCodec``, and stands in for it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from chat_models import ADD, Engine, template, tokenizer_of
from nemorl.errors import BackendError, UsageError
from nemorl_rl.chat.codec import Spoken, codec_of
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.chat.messages import plain_messages
from nemorl_rl.chat.renderer import RendererCodec
from nemorl_rl.chat.template import TemplateCodec
from recorded_messages import Raises

pytest.importorskip("renderers", reason="pip install 'nemorl-rl[agents]'")

MORE_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<|video_pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", "<|tool>", "<tool|>", '<|"|>', "<|image|>", "<|think|>", "<pad>"),
    *("<|image>", "<image|>", "<|video|>", "<|audio|>", "/nothink", "<|end_of_text|>", "<|finetune_right_pad_id|>"),
)
SAME = [
    ("qwen3", "qwen3"),
    ("qwen3.5", "qwen3_5_think"),
    ("qwen3.6", "qwen3_6"),
    ("llama-3", "llama3_2"),
    ("glm-4.5", "glm4moe"),
    ("nemotron-3", "nemotron_3_nano"),
]
SYSTEM, USER = {"role": "system", "content": "Be terse."}, {"role": "user", "content": "1 + 2?"}
YES = {"role": "assistant", "content": "Yes."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}


def both(renderer: str, name: str) -> tuple[RendererCodec, TemplateCodec, Engine]:
    tokenizer = tokenizer_of(template(name), *MORE_TOKENS)
    return RendererCodec(tokenizer, renderer), TemplateCodec(tokenizer), Engine(tokenizer)


@pytest.mark.parametrize(("renderer", "name"), [pair for pair in SAME if pair[0] != "llama-3"])  # it writes the date
def test_both_write_the_same_prompt(renderer: str, name: str) -> None:
    theirs, ours, _ = both(renderer, name)
    messages = plain_messages([SYSTEM, USER])
    assert theirs.render(messages, [ADD]) == ours.render(messages, [ADD])


def test_it_is_given_what_the_template_would_be_given() -> None:
    tokenizer = tokenizer_of(template("qwen3"), *MORE_TOKENS, enable_thinking=False)
    theirs, ours = RendererCodec(tokenizer, "qwen3"), TemplateCodec(tokenizer)
    prompt = theirs.render(plain_messages([USER]), [])
    assert prompt == ours.render(plain_messages([USER]), [])
    assert Engine(tokenizer).text(prompt).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(("renderer", "name"), SAME)
def test_both_continue_an_answer_alike(renderer: str, name: str, is_cut: bool) -> None:
    theirs, ours, engine = both(renderer, name)
    prompt = ours.render(plain_messages([SYSTEM, USER]), [ADD])
    ends = {"call": ours._end or "<|observation|>", "text": ours._end or "<|user|>"}
    for kind, history, new in (
        ("call", [SYSTEM, USER, CALL], [RESULT]),
        ("call", [SYSTEM, USER, CALL], [RESULT, USER]),
        ("text", [SYSTEM, USER, YES], [USER]),
    ):
        answer = engine.ids("</think>42 Sum." + ("" if is_cut else ends[kind]))
        spoken = Spoken(plain_messages(history), prompt, answer)
        their_text = engine.text(theirs.extend(spoken, plain_messages(new), [ADD]) or ())
        our_text = engine.text(ours.extend(spoken, plain_messages(new), [ADD]) or ())
        if renderer == "glm-4.5" and is_cut:  # it ends what was cut with a token that its template never writes
            their_text = their_text.removeprefix("<|endoftext|>")
        assert our_text == their_text != ""


def test_both_end_reasoning_that_was_cut() -> None:
    theirs, ours, engine = both("qwen3", "qwen3")
    prompt = ours.render(plain_messages([USER]), [])
    spoken = Spoken(plain_messages([USER, YES]), prompt, engine.ids("<think>\nhm 42"))
    more = ours.extend(spoken, plain_messages([USER]), [])
    assert more == theirs.extend(spoken, plain_messages([USER]), [])
    assert more is not None


ANSWERS = {
    "qwen3": [
        '<think>\nhm\n</think>\n\nSum.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
        "<tool_call>\n{add}\n</tool_call>",
        '<tool_call>\n{"name": "add"',
        "<think>\nhm",
        "Yes.",
    ],
    "qwen3.5": [
        "hm\n</think>\n\nSum.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "hm",
        "hm</think>Yes.",
    ],
    "glm-4.5": [
        "<think>hm</think>\nSum.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<think></think>Yes.",
    ],
    "llama-3": ['{"name": "add", "parameters": {"a": 1}}', "Yes."],
    "nemotron-3": [
        "hm\n</think>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "hm</think>Yes.",
    ],
}


@pytest.mark.parametrize(("renderer", "name"), [pair for pair in SAME if pair[0] in ANSWERS])
def test_both_read_an_answer_alike(renderer: str, name: str) -> None:
    theirs, ours, engine = both(renderer, name)
    prompt = ours.render(plain_messages([USER]), [ADD])
    for text in ANSWERS[renderer]:
        found = []
        for codec in (theirs, ours):
            parsed = codec.parse(engine.ids(text + (ours._end or "<|user|>")), prompt, [ADD])
            calls = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
            content = "" if parsed.malformed_tool_calls else parsed.content.strip()
            found.append((content, parsed.reasoning.strip(), calls, parsed.malformed_tool_calls))
        assert found[0] == found[1], text


def test_a_family_that_nemorl_does_not_read_goes_through_it() -> None:
    tokenizer = tokenizer_of(template("gemma4"), *MORE_TOKENS)
    engine, codec = Engine(tokenizer), codec_of(tokenizer)
    assert isinstance(codec, RendererCodec)
    conversation = Conversation(codec, seed=1)
    history: list[Any] = [USER]
    recorded: tuple[int, ...] = ()
    for _ in range(3):
        prompt = conversation.prompt(history, [ADD])
        assert prompt.token_ids[: len(recorded)] == recorded
        assert prompt.realigned_tokens == 0
        completion = engine.say(prompt, "<|tool_call>call:add{a:1,b:2}<tool_call|><|tool_response>", is_cut=True)
        reply = conversation.reply(prompt, completion)
        [call] = reply.message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        recorded = (*prompt.token_ids, *completion.token_ids)
        history += [reply.message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]


def test_a_renderer_that_does_not_exist_is_named(raises: Raises) -> None:
    with raises(UsageError, "qwen33", varies=r"Known: .*\]"):
        codec_of(tokenizer_of(template("qwen3")), "qwen33")


def test_the_package_is_asked_for_where_it_is_needed(raises: Raises, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    assert isinstance(codec_of(tokenizer_of(template("qwen3"))), TemplateCodec)
    with raises(BackendError, "gpt-oss", "nemorl-rl[agents]"):
        codec_of(tokenizer_of(template("gptoss")))
