"""Tokenizers with the chat templates of real models, and an engine that says what it is told to, oddly spelt."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from nemorl.types import Completion
from nemorl_rl.chat.conversation import ChatPrompt
from nemorl_rl.data.tokenizer import Tokenizer

MARKS = re.compile(
    r"<[|｜][^<>{}' ]{1,30}[|｜]>|</?(?:think|tool_call|tool_response|eos|bos|s)>|<(?:start|end)_of_turn>"
    r"|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|THINK)\]"
)
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|end|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
)
MERGES = ("ad", "um", "er", "st", "se", "me", "42", ": ", "\n\n", "12", "Le", "th", "in", "ol")
"""Pairs that are one token when text is encoded. Nothing that is sampled here holds them."""
TAGGED = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template of our own that knows tools: ``<system>calculate<user>1+1=<assistant>``."""

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def template_names() -> list[str]:
    """Those that the package trl carries, as their models' authors wrote them."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return []
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return sorted(path.stem for path in folder.glob("*.jinja") if not path.stem.endswith("_training"))


@cache
def template(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("trl, which carries the templates of models, is not installed")
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


def training_template(name: str) -> str | None:
    """The template with ``{% generation %}`` around the assistant's words: trl's, or the model's own."""
    own = template(name)
    training = f"{name}_training"
    return own if "endgeneration" in own else template(training) if training in _training_names() else None


def _training_names() -> set[str]:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return {path.stem for path in folder.glob("*_training.jinja")}


def tokenizer_of(text: str, *more: str, **template_kwargs: Any) -> Tokenizer:
    """A tokenizer of single characters and a few pairs, with this chat template and these tokens more."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    marks = sorted({*MARKS.findall(text), "<eos>", "<bos>", "<tool_call>", "</tool_call>", *more})
    letters = [chr(code) for code in range(32, 127)] + ["\n", "é", "▁"]
    pairs = [(pair[:-1], pair[-1]) for pair in MERGES]
    vocabulary = {token: number for number, token in enumerate(["<unk>", *marks, *letters, *MERGES])}
    inner = Inner(models.BPE(vocabulary, pairs, unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    end = next(mark for mark in ENDS if mark in marks)
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, unk_token="<unk>", eos_token=end, bos_token="<bos>", chat_template=text
    )
    wrapped.add_tokens(marks)
    return Tokenizer(wrapped, template_kwargs)


class Engine:
    """Samples texts letter by letter, where the tokenizer itself would write pairs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._marks = re.compile("|".join(re.escape(mark) for mark in self.tokenizer.inner.get_added_vocab()))

    def ids(self, text: str) -> tuple[int, ...]:
        found: list[int] = []
        at = 0
        for match in [*self._marks.finditer(text), None]:
            until = match.start() if match else len(text)
            found += self.tokenizer.inner.convert_tokens_to_ids(list(text[at:until]))
            if match:
                found += self.tokenizer.inner.convert_tokens_to_ids([match[0]])
                at = match.end()
        return tuple(found)

    def say(self, prompt: ChatPrompt, text: str, *, is_cut: bool = False) -> Completion:
        end = () if is_cut else (self.tokenizer.inner.eos_token_id,)
        ids = (*self.ids(text), *end)
        return Completion(ids, (-1.0,) * len(ids), "length" if is_cut else "stop")

    def text(self, ids: tuple[int, ...]) -> str:
        decoded: str = self.tokenizer.inner.decode(list(ids), skip_special_tokens=False)
        return decoded
