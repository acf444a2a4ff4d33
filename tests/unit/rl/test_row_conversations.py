"""Nothing of a row's conversation is lost: it reaches the template, or the row is refused by name.

The template of these tests writes all that it is given: tools, names, calls, parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chat_models import ADD, tokenizer_of
from nemorl.errors import DataError
from nemorl_rl.chat.provenance import MarkedTemplate
from nemorl_rl.data.encoding import encode_pair, encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.prompts import to_prompt
from recorded_messages import Raises

SHOWS_ALL = (
    "{% for tool in tools or [] %}<|tool|>{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.name or '' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT_ONLY = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content + '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(SHOWS_ALL, "<|end|>")


def demonstration(row: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    return encode_row({"response": "Yes.", **row}, tokenizer)[0]


def preference(row: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    return encode_pair({"chosen": "Yes.", "rejected": "No.", **row}, tokenizer).prompt


def prompt(row: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    return list(to_prompt(row, 0, tokenizer).token_ids)


Reads = Callable[[dict[str, Any], Tokenizer], list[int]]
READERS = [demonstration, preference, prompt]
PARTS = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]


@pytest.mark.parametrize("reads", READERS)
@pytest.mark.parametrize("column", ["image", "images", "video", "videos", "audio", "audios"])
def test_a_column_of_pictures_or_sounds_is_refused(
    column: str, reads: Reads, tokenizer: Tokenizer, raises: Raises
) -> None:
    for asked in ("1 + 2?", [user("1 + 2?")]):
        with raises(DataError, column):
            reads({"prompt": asked, column: ["cat.png"]}, tokenizer)
        for empty in (None, "", []):  # as tables have it for rows without one
            assert reads({"prompt": asked, column: empty}, tokenizer) == reads({"prompt": asked}, tokenizer)


@pytest.mark.parametrize("reads", READERS)
@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_a_picture_among_the_parts_of_a_message_is_refused(kind: str, reads: Reads, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=repr(kind)):
        reads({"prompt": [user([*PARTS, {"type": kind, kind: "cat.png", "text": None}])]}, tokenizer)


@pytest.mark.parametrize("reads", READERS)
def test_the_tools_of_a_row_are_shown(reads: Reads, tokenizer: Tokenizer) -> None:
    tools = {**ADD, "function": {**ADD["function"], "strict": None}}  # as a table pads it
    text = tokenizer.decode(reads({"prompt": [user("1 + 2?")], "tools": [tools]}, tokenizer))
    assert "Adds two numbers." in text
    assert "strict" not in text
    assert "Adds two numbers." not in tokenizer.decode(reads({"prompt": [user("1 + 2?")], "tools": []}, tokenizer))


@pytest.mark.parametrize("reads", READERS)
def test_parts_of_content_are_shown_as_the_template_shows_them(reads: Reads, tokenizer: Tokenizer) -> None:
    ids = reads({"prompt": [user(PARTS)]}, tokenizer)
    assert ids == reads({"prompt": [user("1 + 2?")]}, tokenizer)
    assert ids == reads({"prompt": [user(["1 + ", "2?"])]}, tokenizer)
    plain = tokenizer_of(TEXT_ONLY, "<|end|>")
    assert reads({"prompt": [user(PARTS)]}, plain) == reads({"prompt": [user("1 + \n2?")]}, plain)


@pytest.mark.parametrize("reads", READERS)
def test_calls_results_and_names_before_the_answer_are_shown(reads: Reads, tokenizer: Tokenizer) -> None:
    result = {"role": "tool", "name": "adder", "tool_call_id": "c1", "content": "3"}
    row = {"prompt": [user("1 + 2?"), said(None, tool_calls=[CALL]), result], "tools": [ADD]}
    shown = tokenizer.inner.decode(reads(row, tokenizer))
    assert '<|assistant|>[add {"a": 1}]<|end|><|tool|>adder3<|end|>' in shown


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("a")], "tools": "add"},
        {"prompt": [user("a")], "tools": {"add": 1}},
        {"prompt": [user("a")], "tools": [{"type": "function"}]},
        {"prompt": [{"role": "user", "content": 3}]},
        {"prompt": [user("a"), said("", tool_calls=[{"function": {}}])]},
        {"prompt": [user("a"), said("b", thinking="so so")]},
        {"prompt": [user("a"), said("", tool_calls=5)]},
        {"messages": 5},
    ],
    ids=["no JSON", "no list", "no name", "number", "nameless call", "hidden thought", "no calls", "no messages"],
)
def test_what_cannot_be_shown_is_refused(row: dict[str, Any], tokenizer: Tokenizer, raises: Raises) -> None:
    with raises(DataError):
        encode_row({**row, "response": "3"} if "prompt" in row else row, tokenizer)


@pytest.mark.parametrize("reads", READERS)
def test_half_a_character_is_a_sign_that_says_so(reads: Reads, tokenizer: Tokenizer) -> None:
    """JSON may hold one, no tokenizer takes it."""
    for asked, same in (("a\ud83d", "a\ufffd"), ([user("a\ud83d")], [user("a\ufffd")])):
        assert reads({"prompt": asked}, tokenizer) == reads({"prompt": same}, tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("a"), said("b")], "tools": [ADD]},
        {"messages": [user("a"), said("b", tool_calls=[CALL])]},
        {"messages": [user("a"), said("b"), {"role": "narrator", "content": "c"}, said("d")]},
    ],
    ids=["tools", "calls", "roles"],
)
def test_what_a_template_leaves_out_is_refused(row: dict[str, Any], raises: Raises) -> None:
    known = "{% if message.role in ('user', 'assistant') %}"
    template = TEXT_ONLY.replace("<|{{", known + "<|{{").replace("<|end|>", "<|end|>{% endif %}", 1)
    with raises(DataError):
        encode_row(row, tokenizer_of(template, "<|end|>"))


TEXT_REPLY = {"prompt": "1 + 2?", "chosen": [said("b", tool_calls=[CALL])], "rejected": "c"}
APART = {"chosen": [user("a"), said("b")], "rejected": [user("c"), said("d")]}
TWO_MESSAGES = {"prompt": [user("a")], "chosen": [said("b"), said("c")], "rejected": "d"}


@pytest.mark.parametrize(
    "row", [TEXT_REPLY, APART, TWO_MESSAGES], ids=["a call to text", "two prompts", "two messages"]
)
def test_a_preference_that_is_none_is_refused(row: dict[str, Any], tokenizer: Tokenizer, raises: Raises) -> None:
    with raises(DataError):
        encode_pair(row, tokenizer)


def written_for(template: str, count: int = 3) -> list[tuple[int | None, str]]:
    messages = [{"role": "user", "content": letter} for letter in "abcdef"[:count]]
    text, segments = MarkedTemplate(template).render(messages)
    return [(one.message, text[one.start : one.end]) for one in segments]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<{% for m in messages %}{{ m.content }}{% endfor %}>", "-< 0a 1b 2c ->"),
        ("{% for m in messages[1:] %}{{ m.content }},{% endfor %}", "1b, 2c,"),
        ("{% for m in messages if m.content != 'b' %}{{ m.content }}{% endfor %}", "0a 2c"),
        (
            "{% for m in messages %}{% if loop.first %}x{% continue %}{% endif %}{{ m.content }}{% endfor %}y",
            "0x 1b 2c -y",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}y",
            "0a 1b -y",
        ),
        ("{% for i in range(3) %}{% set m = messages[i] %}{{ m.content }}{% endfor %}y", "0a 1b 2c -y"),
        (
            "{% for i in range(2) %}{% set m = messages[i] %}{% set n = messages[i + 1] %}{{ m.content }}{% endfor %}",
            "0a 1b",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% for n in messages[loop.index:] %}{{ n.content }}{% break %}"
            "{% endfor %}.{% endfor %}",
            "0a 1b 0. 1b 2c 1. 2c.",
        ),
        (
            "{% macro all(ms) %}{% for m in ms %}{{ m.content }}{% endfor %}{% endmacro %}{{ all(messages) }}y",
            "0a 1b 2c -y",
        ),
        ("{% for m in messages %}{% set before = messages[0] %}{{ m.content }}{% endfor %}", "0a 1b 2c"),
        (
            "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }}{{ all }}",
            "0a 1b 2c 0a 1b 2c",
        ),
        ("{% for letter in 'xy' %}{{ letter }}{% endfor %}", "-xy"),
    ],
)
def test_each_part_of_the_text_is_known_by_its_message(template: str, expected: str) -> None:
    found = written_for(template)
    assert " ".join(f"{'-' if message is None else message}{text}" for message, text in found) == expected


HEADERS = {
    "header in the user's turn": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>"
        "{% endif %}{% endfor %}",
        ["A.</s>", "B.</s>"],
    ),
    "prompt within the loop": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% if loop.last and add_generation_prompt %}"
        "<|assistant|>{% endif %}{% endfor %}",
        ["A.</s>", "B.</s>"],
    ),
    "lines and spaces before the header": (
        "{% for m in messages %}\n\n  {% if m.role == 'user' %}{{ '[INST]' + m.content }}{% else %}\n    "
        "{{ '<|me|>\n' + m.content + '</s>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}\n{{ '<|me|>\n' }}{% endif %}",
        ["A.</s>", "B.</s>"],
    ),
    "a prompt that goes on with what an answer may lack": (
        "{% for m in messages %}<|{{ m.role }}|>name\n{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>name\n<|channel|>thought\n{% endif %}",
        ["A.</s>", "B.</s>"],
    ),
    "an answer like the beginning of a header": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}{% else %}{{ m.content }}</s>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}A.I.:{% endif %}",
        ["A.</s>", "B.</s>"],
    ),
    "no special tokens": (
        "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant>{% endif %}",
        [" A.\n", " B.\n"],
    ),
    "generation": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}",
        ["A.<|im_end|>", "B.<|im_end|>"],
    ),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_an_answer_begins_behind_its_header(kind: str) -> None:
    template, learnt = HEADERS[kind]
    tokenizer = tokenizer_of(template, "</s>")
    ids, mask, _ = encode_row({"messages": [user("a"), said("A."), user("b"), said("B.")]}, tokenizer)
    shown = "".join(
        token if is_learnt else "\0"
        for token, is_learnt in zip((tokenizer.inner.decode([one]) for one in ids), mask, strict=True)
    )
    assert [run for run in shown.split("\0") if run] == learnt


def test_what_looks_like_a_mark_in_a_row_is_refused(tokenizer: Tokenizer, raises: Raises) -> None:
    with raises(DataError):
        demonstration({"prompt": [user("\ufdd01,-1,1\ufdd1")]}, tokenizer)
