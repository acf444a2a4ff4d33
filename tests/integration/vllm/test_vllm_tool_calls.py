"""Tool calls as vLLM's own parsers read them: clients of a served model see what the policy was trained to say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nemorl_rl.chat.answers import BARE, BLOCKS, AnswerFormat, Marks
from nemorl_testing.models import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEEPSEEK, TAGGED, PIPED, LFM2 = BLOCKS[1:]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
SUM = '{"name": "add", "arguments": {"a": 1,  "b": 2}}'
VALUES = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
XML = f"<tool_call>\n<function=add>\n{VALUES}</function>\n</tool_call>"
ARGUMENTS = "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_3 = f'{BEGIN}function{SEP}add\n```json\n{{"a": 1}}\n```{END}'
DEEPSEEK_31 = f'{BEGIN}add{SEP}{{"a": 1}}{END}{BEGIN}add{SEP}{{"a": 2}}{END}'

CASES: list[tuple[str, Marks, str]] = [
    ("hermes", TAGGED, f"Sum.\n<tool_call>\n{SUM}\n</tool_call>"),
    ("hermes", TAGGED, f"<tool_call>\n{SUM}\n</tool_call>\n<tool_call>{SUM}</tool_call>"),
    ("hermes", TAGGED, "No."),
    ("qwen3_coder", TAGGED, f"Sum.\n{XML}"),
    ("qwen3_coder", TAGGED, f"{XML}\n{XML}"),
    ("glm45", TAGGED, f"Sum.\n<tool_call>add\n{ARGUMENTS}</tool_call>"),
    ("llama3_json", BARE, '{"name": "add", "parameters": {"a": 1}}'),
    ("llama3_json", BARE, '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'),
    ("llama3_json", BARE, "No."),
    ("deepseek_v3", DEEPSEEK, f"Sum.<｜tool▁calls▁begin｜>{DEEPSEEK_3}<｜tool▁calls▁end｜>"),
    ("deepseek_v31", DEEPSEEK, f"Sum.<｜tool▁calls▁begin｜>{DEEPSEEK_31}<｜tool▁calls▁end｜>"),
    ("granite", PIPED, f"<|tool_call|>[{SUM}]"),
    ("lfm2", LFM2, "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>Sum."),
    ("lfm2", LFM2, '<|tool_call_start|>[add(a=1, b="x"), add(a=[1, 2])]<|tool_call_end|>'),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One with the marks of all families, which some of the parsers ask for."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(tiny_model())
    marks = {mark for block in BLOCKS for mark in (block.open, block.close, *block.dropped) if mark}
    found.add_tokens(sorted({*marks, SEP, "<|python_tag|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}))
    return found


@pytest.mark.parametrize(("parser", "marks", "text"), CASES)
def test_vllm_reads_the_same_calls(tokenizer: Any, parser: str, marks: Marks, text: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    asked = [{"role": "user", "content": "1 + 2?"}]
    request = ChatCompletionRequest(model="m", messages=asked, tools=[ADD], tool_choice="auto")
    read = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools).extract_tool_calls(text, request)
    theirs = [(call.function.name, json.loads(call.function.arguments)) for call in read.tool_calls]
    parsed = AnswerFormat(None, marks).parse(text, [ADD], is_reasoning=False)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == theirs
    assert parsed.content.strip() == (read.content or "").strip()
