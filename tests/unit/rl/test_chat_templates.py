"""TemplateCodec with the chat templates of real models, as the package trl carries them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_models import ADD, Engine, template, template_names, tokenizer_of
from nemorl.errors import DataError
from nemorl_rl.chat.codec import Spoken
from nemorl_rl.chat.conversation import Conversation
from nemorl_rl.chat.messages import plain_messages
from nemorl_rl.chat.template import TemplateCodec
from nemorl_rl.data.tokenizer import Tokenizer
from recorded_messages import Raises

SYSTEM, USER = {"role": "system", "content": "Be terse."}, {"role": "user", "content": "1 + 2?"}
YES, MORE = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
CALL = {
    "role": "assistant",
    "content": "Sum.",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
}
READ_BY_RENDERERS = ("gemma4", "diffusion_gemma", "gptoss")
"""Families whose answers nemorl does not read itself."""


def codec_of(name: str) -> TemplateCodec:
    return TemplateCodec(tokenizer_of(template(name)))


def added(codec: TemplateCodec, history: list[dict[str, Any]], new: list[dict[str, Any]], tools: Any) -> str | None:
    return codec._added(plain_messages(history), plain_messages(new), tools)


def whole(codec: TemplateCodec, messages: list[dict[str, Any]], tools: Any) -> str | None:
    try:
        return codec._template.text(plain_messages(messages), tools)
    except DataError:
        return None


@pytest.mark.parametrize("name", [name for name in template_names() if not name.startswith(READ_BY_RENDERERS)])
def test_what_is_added_to_an_answer_is_how_the_whole_would_end(name: str) -> None:
    codec, checked = codec_of(name), 0
    cases: list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[Any]]] = [
        ([USER, YES], [MORE], []),
        ([SYSTEM, USER, YES], [MORE], []),
        ([SYSTEM, USER, YES, MORE, YES], [MORE], []),
        ([SYSTEM, USER, CALL], [RESULT], [ADD]),
        ([SYSTEM, USER, CALL], [RESULT, MORE], [ADD]),
    ]
    if name != "deepseekv3":  # it opens the results of a conversation's first calls alone
        cases.append(([USER, CALL, RESULT, CALL], [RESULT], [ADD]))
    for history, new, tools in cases:
        text = whole(codec, [*history, *new], tools)
        more = added(codec, history, new, tools)
        if text is not None and more is not None:
            assert text.endswith(more)
            before = text.removesuffix(more).rstrip()
            assert before.endswith(codec._end or ("Yes." if new == [MORE] else "</tool_call>"))
            checked += 1
    shows_content = "Yes." in (whole(codec, [USER, YES, MORE], []) or "")
    assert checked >= (1 if shows_content else 0)


WITH_TOOLS = [
    name
    for name in template_names()
    if not name.startswith((*READ_BY_RENDERERS, "lfm2", "cohere", "muse"))
    and ("tool_calls" in template(name))
    and "tools" in template(name)
]


@pytest.mark.parametrize("name", [*WITH_TOOLS, "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2"])
def test_a_call_as_the_template_writes_it_is_read_back(name: str) -> None:
    """Round trip: each family's call is taken from its own template, spelt in other tokens, and read."""
    codec = codec_of(name)
    engine = Engine(codec._tokenizer)
    messages = plain_messages([USER, CALL])
    text = codec._template.text(messages, [ADD], prompt=False).rpartition("1 + 2?")[2]
    begin = text.index("Sum.") if "Sum." in text else text.index("{")  # Llama writes no text beside a call
    until = text.rindex(codec._end) if codec._end else len(text)
    parsed = codec.parse(engine.ids(text[begin:until]), [], [ADD])
    assert parsed.content == ("Sum." if "Sum." in text else "")
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [("add", {"a": 1, "b": 2})]


KEEPS_WHAT_WAS_SAID = ["cohere", "gemma3", "llama3", "llama3_1", "llama3_2", "phi3", "phi3_5", "qwen2_5", "lfm2_v2"]


@pytest.mark.parametrize("name", KEEPS_WHAT_WAS_SAID)
def test_an_answer_as_the_template_writes_it_goes_on_as_the_template_would(name: str) -> None:
    """Three turns spliced are, token by token, one rendering of the whole, where sampling did as the tokenizer does."""
    codec = codec_of(name)
    engine = Engine(codec._tokenizer)
    history = [USER]
    ids = codec.render(plain_messages(history), [])
    for _ in range(3):
        answer = tuple(codec._tokenizer.encode_observation(f"Yes.{codec._end}"))
        more = codec.extend(Spoken(plain_messages([*history, YES]), ids, answer), plain_messages([MORE]), [])
        assert more is not None
        history, ids = [*history, YES, MORE], (*ids, *answer, *more)
        assert ids == codec.render(plain_messages(history), [])
        assert engine.text(ids).count("Yes.") == len(history) // 2


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("qwen2_5", "Yes<|im_end|>\n<|im_start|>user\n"),
        ("llama3", "Yes<|eot_id|><|start_header_id|>user"),
        ("phi3", "Yes<|end|>\n<|user|>\n"),
        ("gemma3", "Yes<end_of_turn>\n<start_of_turn>user\n"),
        ("glm4moe", "Yes<|user|>\n"),
    ],
)
def test_an_answer_that_was_cut_is_closed_as_context(name: str, closed: str) -> None:
    codec = codec_of(name)
    engine = Engine(codec._tokenizer)
    prompt = codec.render(plain_messages([USER]), [])
    spoken = Spoken(plain_messages([USER, YES]), prompt, engine.ids("Yes"))
    more = codec.extend(spoken, plain_messages([MORE]), [])
    assert more is not None
    assert f"{engine.text((*spoken.token_ids, *more))}".count(closed) == 1


def test_reasoning_that_was_cut_is_ended() -> None:
    codec = codec_of("qwen3")
    engine = Engine(codec._tokenizer)
    spoken = Spoken(plain_messages([USER, YES]), codec.render(plain_messages([USER]), []), engine.ids("<think>\nhm"))
    more = codec.extend(spoken, plain_messages([MORE]), [])
    assert more is not None
    assert engine.text(more).startswith("</think><|im_end|>\n<|im_start|>user\nAnd then?")


def test_what_ends_an_answer_may_begin_the_next_message() -> None:
    """GLM samples ``<|observation|>`` where it waits for a tool: it is not written twice."""
    codec = codec_of("glm4moe")
    engine = Engine(codec._tokenizer)
    call = engine.ids("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>")
    spoken = Spoken(plain_messages([USER, CALL]), codec.render(plain_messages([USER]), [ADD]), call)
    more = codec.extend(spoken, plain_messages([RESULT]), [ADD])
    assert more is not None
    assert engine.text((*call, *more)).count("<|observation|>") == 1
    assert engine.text(more).startswith("\n<tool_response>\n3")


# As Mistral's first template with tools has it, in short: tools and the system message move to the last question.
MOVING = """{%- if messages[0].role == "system" %}{%- set told = messages[0].content %}
{%- set messages = messages[1:] %}{%- endif %}{{- "<bos>" }}
{%- set asked = messages | selectattr("role", "equalto", "user") | list %}
{%- for m in messages %}{%- if m.role == "user" %}
{%- if tools and m == asked[-1] %}{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST] " + (told + "\n\n" if told is defined and loop.last else "") + m.content + "[/INST]" }}
{%- elif m.tool_calls is defined %}{{- "[TOOL_CALLS] [" }}{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{{- (c.function | tojson)[:-1] + ", \\"id\\": \\"" + c.id + "\\"}" + ("" if loop.last else ", ") }}
{%- endfor %}{{- "]</s>" }}{%- elif m.role == "assistant" %}{{- " " + m.content + "</s>" }}
{%- elif m.role == "tool" %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception("Tool call IDs should have length 9!") }}{%- endif %}
{{- "[TOOL_RESULTS] {\\"content\\": \\"" + m.content }}
{{- "\\", \\"call_id\\": \\"" + m.tool_call_id + "\\"}[/TOOL_RESULTS]" }}
{%- endif %}{%- endfor %}"""


def test_a_template_that_moves_what_was_written_is_not_continued() -> None:
    codec = TemplateCodec(tokenizer_of(MOVING))
    assert added(codec, [USER, YES], [MORE], []) == "[INST] And then?[/INST]"
    assert added(codec, [USER, YES], [MORE], [ADD]) is None, "the tools would move to the new question"
    assert added(codec, [SYSTEM, USER, YES], [MORE], []) is None, "so would the system message"
    result = added(codec, [USER, CALL], [RESULT], [ADD])
    assert result is not None
    assert result.startswith('[TOOL_RESULTS] {"content": "3", "call_id": "')


def test_what_such_a_template_writes_anew_is_counted() -> None:
    tokenizer = tokenizer_of(MOVING)
    engine, conversation = Engine(tokenizer), Conversation(TemplateCodec(tokenizer), seed=1)
    first = conversation.prompt([USER], [ADD])
    said = engine.say(first, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]')
    reply = conversation.reply(first, said)
    [call] = reply.message["tool_calls"]
    history = [USER, reply.message, {**RESULT, "tool_call_id": call["id"]}]
    second = conversation.prompt(history, [ADD])
    assert second.token_ids[: len(first.token_ids) + len(said.token_ids)] == (*first.token_ids, *said.token_ids)
    assert second.realigned_tokens == 0
    answer = engine.say(second, "It is 3.")
    message = conversation.reply(second, answer).message
    third = conversation.prompt([*history, message, MORE], [ADD])
    assert third.realigned_tokens == len(said.token_ids) + len(answer.token_ids)
    assert engine.text(third.token_ids).count("[AVAILABLE_TOOLS]") == 1


def test_ids_of_calls_are_written_in_the_length_that_the_template_wants() -> None:
    codec = TemplateCodec(tokenizer_of(MOVING))
    text = codec._template.text(plain_messages([USER, CALL, RESULT]), [ADD])
    own = text.partition('"id": "')[2][:9]
    assert own.isalnum()
    assert f'"call_id": "{own}"' in text


def test_the_developer_is_the_system_where_a_template_knows_none() -> None:
    codec = codec_of("qwen2_5")
    developer = {"role": "developer", "content": "Be terse."}
    assert codec.render(plain_messages([developer, USER]), []) == codec.render(plain_messages([SYSTEM, USER]), [])


def test_the_template_s_own_arguments_are_kept() -> None:
    tokenizer = tokenizer_of(template("qwen3"), enable_thinking=False)
    codec = TemplateCodec(tokenizer)
    engine = Engine(tokenizer)
    prompt = codec.render(plain_messages([USER]), [])
    assert engine.text(prompt).endswith("<think>\n\n</think>\n\n")
    more = codec.extend(Spoken(plain_messages([USER, YES]), prompt, engine.ids("Yes.")), plain_messages([MORE]), [])
    assert more is not None
    assert engine.text(more).endswith("<think>\n\n</think>\n\n")
    assert codec.parse(engine.ids("Yes.<|im_end|>"), prompt, [ADD]).content == "Yes."


@pytest.mark.parametrize("name", ["phi3", "gemma3", "llama3"])
def test_tools_that_a_template_does_not_show_are_refused(name: str, raises: Raises) -> None:
    codec = codec_of(name)
    with raises(DataError, "policy.tokenizer.chat_template"):
        codec.render(plain_messages([USER]), [ADD])


def test_calls_in_a_form_that_is_not_known_are_refused_before_anything_is_sampled(raises: Raises) -> None:
    with raises(DataError, "policy.tokenizer.chat_template"):
        codec_of("muse_glimmer").render(plain_messages([USER]), [ADD])
    assert codec_of("muse_glimmer").render(plain_messages([USER]), [])


def metaspace_tokenizer() -> Tokenizer:
    """As Llama 2's and Mistral's: text after a special token gets a space of its own."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "<bos>", "</s>", "[INST]", "[/INST]", "▁", *map(chr, range(33, 127)), "\n"]
    inner = Inner(models.BPE({token: at for at, token in enumerate(letters)}, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    text = """{{ "<bos>" }}{% for m in messages %}{% if m.role == "user" %}{{ "[INST] " + m.content + " [/INST]" }}
{%- else %}{{ " " + m.content + "</s>" }}{% endif %}{% endfor %}"""
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, unk_token="<unk>", bos_token="<bos>", eos_token="</s>", chat_template=text
    )
    wrapped.add_tokens(["[INST]", "[/INST]"])
    return Tokenizer(wrapped)


def test_text_is_encoded_as_it_is_behind_the_end_of_an_answer() -> None:
    codec = TemplateCodec(metaspace_tokenizer())
    answered = plain_messages([USER, YES, MORE])
    whole_ids = codec.render(answered, [])
    end = codec._tokens["</s>"]
    upto = whole_ids.index(end) + 1
    prompt = codec.render(plain_messages([USER]), [])
    spoken = Spoken(plain_messages([USER, YES]), prompt, whole_ids[len(prompt) : upto])
    assert codec.extend(spoken, plain_messages([MORE]), []) == whole_ids[upto:]


def test_an_order_that_a_template_refuses_is_the_client_s_mistake(raises: Raises) -> None:
    with raises(DataError, "alternate"):
        codec_of("gemma3").render(plain_messages([USER, MORE]), [])
