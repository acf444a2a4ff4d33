"""Answers taken apart: each family's way of writing calls, and what is wrong with some."""

from __future__ import annotations

import json
import random

import pytest
from chat_models import ADD
from nemorl_rl.chat.answers import BARE, BLOCKS, REASONING, AnswerFormat, Marks, call_marks
from nemorl_rl.chat.calls import calls_in
from nemorl_rl.chat.codec import ToolCall
from recorded_messages import Raises

MISTRAL, DEEPSEEK, TAGGED, PIPED, LFM2 = BLOCKS
THINK = REASONING[0]
CALL = ToolCall("add", '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("marks", "text", "content"),
    [
        (TAGGED, 'Sum.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "Sum."),
        (
            TAGGED,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
            "</tool_call>",
            "",
        ),
        (
            TAGGED,
            "Sum.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
            "Sum.",
        ),
        (PIPED, '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]', ""),
        (PIPED, '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]<|/tool_call|>', ""),
        (LFM2, "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>Sum.", "Sum."),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', ""),
        (MISTRAL, 'Sum.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', "Sum."),
        (MISTRAL, '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1, "b": 2}', ""),
        (MISTRAL, '[TOOL_CALLS]add{"a": 1, "b": 2}', ""),
        (
            DEEPSEEK,
            "Sum.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "Sum.",
        ),
        (
            DEEPSEEK,
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            "",
        ),
        (BARE, '{"name": "add", "parameters": {"a": 1, "b": 2}}', ""),
        (BARE, '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', ""),
        (BARE, '{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}', ""),
    ],
)
def test_each_family_s_call_is_read(marks: object, text: str, content: str) -> None:
    parsed = AnswerFormat(None, marks).parse(text, [ADD], is_reasoning=False)  # type: ignore[arg-type]
    assert parsed.tool_calls == (CALL,)
    assert (parsed.content, parsed.malformed_tool_calls) == (content, 0)


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (
            TAGGED,
            CALLS := "".join(f'<tool_call>{{"name": "f{n}", "arguments": {{"x": {n}}}}}</tool_call>\n' for n in (1, 2)),
        ),
        (MISTRAL, '[TOOL_CALLS][{"name": "f1", "arguments": {"x": 1}}, {"name": "f2", "arguments": {"x": 2}}]'),
        (MISTRAL, '[TOOL_CALLS]f1[ARGS]{"x": 1}[TOOL_CALLS]f2[ARGS]{"x": 2}'),
        (BARE, '{"name": "f1", "parameters": {"x": 1}}; {"name": "f2", "parameters": {"x": 2}}'),
        (LFM2, "<|tool_call_start|>[f1(x=1), f2(x=2)]<|tool_call_end|>"),
    ],
)
def test_several_calls_keep_their_order(marks: object, text: str) -> None:
    parsed = AnswerFormat(None, marks).parse(text, [ADD], is_reasoning=False)  # type: ignore[arg-type]
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [
        ("f1", {"x": 1}),
        ("f2", {"x": 2}),
    ]


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
        '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>" + '{"a":' * 5000 + "</tool_call>",
        "<tool_call>[f(" * 3 + "</tool_call>",
    ],
)
def test_a_malformed_call_stays_in_the_text_and_is_counted(block: str) -> None:
    form = AnswerFormat(None, TAGGED)
    alone = form.parse(f"Sum. {block}", [ADD], is_reasoning=False)
    assert (alone.tool_calls, alone.content) == ((), f"Sum. {block}")
    assert alone.malformed_tool_calls == block.count("<tool_call>")
    good = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    both = form.parse(good + block, [ADD], is_reasoning=False)
    assert (both.tool_calls, both.content) == ((CALL,), block)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *('{"name": "add"', '"arguments": ', '"parameters": ', "{", "}", "[", "]", ",", ":", '"', "add(", ")", "a=1", "-"),
    *("1", "null", "\\", "\n", " ", "add", "9" * 5000, "\ud800", "\x00", "é"),
]


@pytest.mark.parametrize("marks", [*BLOCKS, BARE], ids=lambda marks: marks.open or "bare")
def test_nothing_that_a_model_writes_raises(marks: Marks) -> None:
    chance = random.Random(3)
    form = AnswerFormat(THINK, marks)
    for _ in range(2000):
        text = marks.open + "".join(chance.choices(FRAGMENTS, k=chance.randrange(1, 14)))
        parsed = form.parse(text, [ADD], is_reasoning=chance.random() < 0.2)
        assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.tool_calls)


@pytest.mark.parametrize("marks", [*BLOCKS, BARE], ids=lambda marks: marks.open or "bare")
@pytest.mark.parametrize("piece", FRAGMENTS[:24])
def test_an_answer_that_repeats_itself_is_read_in_one_pass(marks: Marks, piece: str) -> None:
    """30,000 times, as a policy that has collapsed does: no reader may begin anew at each."""
    for text in (marks.open + piece * 30_000, marks.open + "{" + piece * 30_000, marks.open + "add" + piece * 30_000):
        AnswerFormat(THINK, marks).parse(text, [ADD], is_reasoning=False)


def test_json_that_is_no_call_is_content() -> None:
    form = AnswerFormat(None, BARE)
    assert form.parse('{"total": 3}', [ADD], is_reasoning=False).content == '{"total": 3}'
    assert form.parse('{"total": 3}', [ADD], is_reasoning=False).malformed_tool_calls == 0
    assert form.parse('{"name": "add", "param', [ADD], is_reasoning=False).malformed_tool_calls == 1


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parsed = AnswerFormat(None, TAGGED).parse(text, [], is_reasoning=False)
    assert (parsed.content, parsed.tool_calls, parsed.malformed_tool_calls) == (text, (), 0)


def test_values_without_quotes_follow_the_schema() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"zip": {"type": "string"}}}}}
    body = (
        "<function=f><parameter=zip>0123</parameter><parameter=n>12</parameter><parameter=t>x y</parameter></function>"
    )
    [call] = calls_in(body, [tool])
    assert json.loads(call.arguments) == {"zip": "0123", "n": 12, "t": "x y"}


def test_arguments_written_as_text_are_the_object_in_it() -> None:
    [call] = calls_in(r'{"name": "add", "arguments": "{\"a\": 1}"}', [])
    assert call.arguments == '{"a": 1}'


@pytest.mark.parametrize(
    ("text", "is_reasoning", "expected"),
    [
        ("<think>\nhm\n</think>\n\n4", False, ("hm", "4")),
        ("hm\n</think>\n\n4", True, ("hm", "4")),
        ("hm</think>4", False, ("hm", "4")),
        ("<think>hm", False, ("hm", "")),
        ("hm", True, ("hm", "")),
        ("4 < 5", False, ("", "4 < 5")),
        (" 4\n", False, ("", " 4\n")),
    ],
)
def test_reasoning_is_split_off(text: str, is_reasoning: bool, expected: tuple[str, str]) -> None:
    parsed = AnswerFormat(THINK, None).parse(text, [ADD], is_reasoning=is_reasoning)
    assert (parsed.reasoning, parsed.content) == expected


def test_a_call_within_reasoning_is_not_made() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    form = AnswerFormat(THINK, TAGGED)
    thought = form.parse(f"<think>I could {call}</think>No.", [ADD], is_reasoning=False)
    assert (thought.content, thought.tool_calls, thought.reasoning) == ("No.", (), f"I could {call}")
    assert form.parse(f"I could {call}", [ADD], is_reasoning=True).tool_calls == ()


def test_the_marks_are_those_that_the_template_writes() -> None:
    assert call_marks('<tool_call>\n{"name": "f"}\n</tool_call>') is TAGGED
    assert call_marks('{"name": "f", "parameters": {}}<|eot_id|>') is BARE
    assert call_marks("f(x)") is None


@pytest.mark.parametrize(
    "body",
    [
        r'{"name": "add", "arguments": {"a": "\ud83d"}}',
        r'{"name": "add", "arguments": {"\udfff": 1}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": [-Infinity]}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        r'[add(a="\ud83d")]',
        "[add(a=1e999)]",
        "[add(a={1})]",
        "[add(a=b'x')]",
        "[add(a=1j)]",
        "[add(**{'a': 1})]",
    ],
)
def test_arguments_that_only_python_can_hold_are_no_call(body: str, raises: Raises) -> None:
    with raises(ValueError):
        calls_in(body, [])


def test_arguments_with_a_whole_pair_are_a_call() -> None:
    assert calls_in(r'{"name": "add", "arguments": {"a": "\ud83d\ude00"}}', [])
