"""Which tokens of a conversation are learnt, with the chat templates of real models, against transformers and TRL.

Token ids are those of transformers' ``apply_chat_template``, masks those of TRL's training templates, which their
authors wrote by hand. Both are read from the installed packages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from chat_models import ADD, template, template_names, tokenizer_of, training_template
from nemorl.errors import DataError
from nemorl_rl.data.encoding import encode_pair, encode_row
from nemorl_rl.data.tokenizer import Tokenizer
from recorded_messages import Raises

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CALL = {"id": "call_1xxx", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
FORMS: dict[str, tuple[Messages, list[Any]]] = {
    "one": ([user("1 + 2?"), said("Yes.")], []),
    "several": (
        [user("1 + 2?"), said("Yes."), user("And then?"), said("No."), user("Well?"), said("Three.")],
        [],
    ),
    "calls": (
        [
            user("1 + 2?"),
            {**said(""), "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1xxx", "name": "add", "content": "3"},
            said("It is 3."),
        ],
        [ADD],
    ),
    "reasoning": (
        [
            user("1 + 2?"),
            said("<think>\nso so\n</think>\n\nYes."),
            user("And then?"),
            said("<think>\nhm hm\n</think>\n\nNo."),
        ],
        [],
    ),
}
NO_TOOLS = ("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5")
NOT_SHOWN = {
    **dict.fromkeys((*NO_TOOLS, "qwen2_5_vl", "smolvlm"), ("calls",)),
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), ("calls", "reasoning")),
}
"""What a template drops without a word, and nemorl therefore refuses: tools or calls, the reasoning that is to be
learnt (DeepSeek cuts off what stands before ``</think>``, in the last answer too)."""
PARTS_ONLY = ("idefics3", "smolvlm", "llava_next")
"""Contents are lists of parts."""
LEARNS_MORE = {
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), "<｜Assistant｜>"),
    **dict.fromkeys(("gptoss", "muse_glimmer"), "<|start|>assistant"),
    "qwen2_5": "\n",
}
"""Of what the generation prompt writes, what TRL's template has a model learn nevertheless. nemorl does not."""
LEARNS_LESS = {"llava_next": " "}
"""What the template writes behind the token that ends an answer, and TRL's has not learnt. After others it has."""
ADDS_AN_END = {"glm4moe": ("<|user|>",)}
"""The template does not end the last answer; TRL's does, with the same token, and so does nemorl."""
CASES = [(name, form) for name in template_names() for form in FORMS]


def as_template_reads(name: str, messages: Messages) -> Messages:
    """The messages in the form in which transformers has to be given them."""
    found: Messages = json.loads(json.dumps(messages))
    for message in found:
        if name in PARTS_ONLY:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return found


@cache
def tokenizer_for(name: str) -> Tokenizer:
    return tokenizer_of(template(name), "<tool_call|>")


def runs(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[Any]) -> list[str]:
    """What is learnt, one text for each unbroken run of tokens."""
    found: list[list[int]] = []
    for (_, before), (token, learnt) in pairwise([(0, False), *zip(ids, mask, strict=True)]):
        if learnt:
            found += [[token]] if not before else []
            found[-1] += [token] if before else []
    return [tokenizer.inner.decode(run) for run in found]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_tokens_are_those_of_transformers_and_masks_those_of_trl(name: str, form: str, raises: Raises) -> None:
    messages, tools = FORMS[form]
    tokenizer = tokenizer_for(name)
    row = {"messages": messages, "tools": tools}
    if form in NOT_SHOWN.get(name, ()):
        with raises(DataError):
            encode_row(row, tokenizer)
        return
    ids, mask, _ = encode_row(row, tokenizer)
    given = as_template_reads(name, messages)
    text = tokenizer.inner.apply_chat_template(given, tools=tools or None, tokenize=False)
    ends = ADDS_AN_END.get(name, ("",))
    assert tokenizer.inner.decode(ids) in [text + end for end in ends]
    assert ids == tokenizer.encode_observation(tokenizer.inner.decode(ids))
    learnt = runs(tokenizer, ids, mask)
    trained = training_template(name)
    if trained is not None:
        theirs = tokenizer.inner.apply_chat_template(
            given, tools=tools or None, chat_template=trained, return_dict=True, return_assistant_tokens_mask=True
        )
        expected = runs(tokenizer, theirs["input_ids"], theirs["assistant_masks"])
        if theirs["input_ids"] == ids:
            assert learnt == [
                run.removeprefix(LEARNS_MORE.get(name, "")) + LEARNS_LESS.get(name, "") for run in expected
            ]
        else:  # they write the reasoning of all turns, where the model's own template drops it
            assert [without_reasoning(run) for run in learnt] == [without_reasoning(run) for run in expected]
            assert name.startswith("qwen3")


def without_reasoning(text: str) -> str:
    return re.sub(r"<think>.*</think>\n\n", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", template_names())
def test_all_that_the_assistant_says_is_learnt_and_nothing_of_others(name: str) -> None:
    """Whatever a template writes: of each message a word that is nowhere else, in five turns."""
    tokenizer = tokenizer_for(name)
    messages = [
        turn for number in range(5) for turn in (user(f"Q{number}q? Yes."), said(f"Yes. A{number}a Q{number} user"))
    ]
    ids, mask, _ = encode_row({"messages": messages}, tokenizer)
    learnt = "".join(runs(tokenizer, ids, mask))
    rest = "".join(runs(tokenizer, ids, [not one for one in mask]))
    for number in range(5):
        assert f"A{number}a" in learnt
        assert f"A{number}a" not in rest
        assert f"Q{number}q" not in learnt
    ids, mask, _ = encode_row({"messages": messages}, tokenizer, only_last_turn=True)
    assert [len(re.findall(r"A\da", run)) for run in runs(tokenizer, ids, mask)] == [1]
    assert "A4a" in runs(tokenizer, ids, mask)[0]


@pytest.mark.parametrize("name", template_names())
def test_a_pair_is_two_whole_conversations(name: str) -> None:
    tokenizer = tokenizer_for(name)
    prompt = [user("1 + 2?"), said("Yes."), user("And then?")]
    pair = encode_pair({"prompt": prompt, "chosen": "No.", "rejected": "\nNever."}, tokenizer)
    for reply, tokens in (("No.", pair.chosen), ("\nNever.", pair.rejected)):
        ids, mask, _ = encode_row({"prompt": prompt, "response": reply}, tokenizer, only_last_turn=True)
        assert [*pair.prompt, *tokens] == ids
        assert len(pair.prompt) <= mask.index(True)
    whole = {"chosen": [*prompt, said("No.")], "rejected": [*prompt, said("\nNever.")]}
    assert encode_pair(whole, tokenizer) == pair


WITH_CALLS = [name for name in template_names() if "calls" not in NOT_SHOWN.get(name, ())]


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_in_every_spelling_are_the_same_tokens(name: str) -> None:
    messages, tools = FORMS["calls"]
    tokenizer = tokenizer_for(name)
    expected = encode_row({"messages": messages, "tools": tools}, tokenizer)
    asked, call, *rest = messages
    spellings = [
        {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {**CALL, "function": {"name": "add", "arguments": {"a": 1, "b": 2, "c": None}}},
        {"id": "call_1xxx", "type": "function", "name": "add", "arguments": {"a": 1, "b": 2}},
    ]
    for spelling in spellings:
        spelt = {"role": "assistant", "content": None, "name": None, "tool_calls": [spelling]}
        row = {"messages": [asked, spelt, *rest], "tools": json.dumps(tools)}
        assert encode_row(row, tokenizer) == expected
    pair = encode_pair({"prompt": [asked], "tools": tools, "chosen": [call], "rejected": "No."}, tokenizer)
    ids, mask, _ = encode_row({"messages": [asked, call], "tools": tools}, tokenizer)
    assert (pair.prompt, pair.chosen) == (ids[: mask.index(True)], ids[mask.index(True) :])


@pytest.mark.parametrize("name", WITH_CALLS)
def test_the_tools_of_a_prompt_are_shown(name: str) -> None:
    tokenizer = tokenizer_for(name)
    asked = [user("1 + 2?")]
    text = tokenizer.inner.apply_chat_template(asked, tools=[ADD], tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode_prompt(asked, [ADD]) == tokenizer.encode_observation(text)
    assert "Adds two numbers." in text


REASONED = {
    "qwen3": "<think>\nhm hm\n</think>\n\nNo.",
    "gptoss": "<|channel|>analysis<|message|>hm hm<|end|>",
    "lfm2_2_5": "<think>hm hm</think>No.",
}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", REASONED)
def test_reasoning_is_learnt_by_whatever_name_the_row_has_it(name: str, field: str) -> None:
    tokenizer = tokenizer_for(name)
    ids, mask, _ = encode_row({"messages": [user("1 + 2?"), {**said("No."), field: "hm hm"}]}, tokenizer)
    assert REASONED[name] in runs(tokenizer, ids, mask)[0]


DROPS = (
    "deepseek",
    "diffusion_gemma",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "lfm2_2_5",
    "nemotron_3",
    "qwen3",
    "qwen3_5",
    "qwen3_6",
)
KEEPS = ("qwen3_8", "qwen3_instruct", "qwen3_vl")
"""By their beginnings; as in docs/algorithms/sft.md."""


@pytest.mark.parametrize("name", [name for name in template_names() if not name.startswith("deepseek")])
def test_reasoning_of_earlier_turns_is_dropped_by_the_families_that_the_page_names(name: str) -> None:
    tokenizer = tokenizer_for(name)
    for field in tokenizer.chat.reasoning_names or ("",):
        answers = [
            {**said(text), field: text * 2} if field else said(f"<think>\n{text * 2}\n</think>\n\n{text}")
            for text in ("A.", "B.")
        ]
        if field and name.startswith("gemma4") and not name.startswith(DROPS):
            continue  # it shows the field beside calls alone
        row = {"messages": [user("1 + 2?"), answers[0], user("And then?"), answers[1]]}
        text = tokenizer.inner.decode(encode_row(row, tokenizer)[0])
        assert "B.B." in text
        assert ("A.A." not in text) == (name.startswith(DROPS) and not name.startswith(KEEPS))


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_text_that_a_template_leaves_out_beside_calls_is_refused(name: str, raises: Raises) -> None:
    row = {"messages": [user("1 + 2?"), {**said("Sum."), "tool_calls": [CALL]}], "tools": [ADD]}
    with raises(DataError):
        encode_row(row, tokenizer_for(name))


@pytest.mark.parametrize("last", ["<|user|>", "<|observation|>"])
def test_an_answer_that_the_next_message_ends_learns_that_token(last: str) -> None:
    """GLM has no token of its own for the end of a turn."""
    tokenizer = tokenizer_for("glm4moe")
    messages, tools = FORMS["calls"]
    messages = messages if last == "<|user|>" else messages[:2]
    ids, mask, _ = encode_row({"messages": messages, "tools": tools}, tokenizer)
    learnt = runs(tokenizer, ids, mask)
    assert learnt[0].endswith("</tool_call><|observation|>")
    assert learnt[-1].endswith(last)
