"""Answers taken apart: reasoning, text and tool calls. Which marks enclose them is read off the chat template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from nemorl_rl.chat.calls import calls_in
from nemorl_rl.chat.codec import ParsedAnswer, ToolCall, Tools


@dataclass(frozen=True, slots=True)
class Marks:
    """The text before and after something. Without ``close`` it lasts until the next ``open``, or the end."""

    open: str
    close: str | None = None
    dropped: tuple[str, ...] = ()
    """Written around all of them, and of no meaning."""


REASONING = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"), Marks("<seed:think>", "</seed:think>"))
BLOCKS = (
    Marks("[TOOL_CALLS]"),  # Mistral
    Marks(
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    ),  # DeepSeek
    Marks("<tool_call>", "</tool_call>"),  # Hermes, Qwen, GLM, SmolLM3, Granite 4
    Marks("<|tool_call|>", "<|/tool_call|>"),  # Phi-4-mini, Granite 3
    Marks("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2
)
BARE = Marks("", None, ("<|python_tag|>",))
"""The answer is the call, as JSON: Llama 3."""


def reasoning_marks(template: str) -> Marks | None:
    """Those of the reasoning, by the text of a chat template."""
    return next((marks for marks in REASONING if marks.close and marks.close in template), None)


def call_marks(shown: str) -> Marks | None:
    """Those of tool calls, by what a template makes of one."""
    found = next((marks for marks in BLOCKS if marks.open in shown), None)
    return BARE if found is None and re.search(r'\{"name":', shown) else found


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes an answer.

    Example:
        >>> form = AnswerFormat(REASONING[0], BLOCKS[2])
        >>> form.parse("I think</think>4", [], is_reasoning=True).reasoning
        'I think'
    """

    reasoning: Marks | None = None
    calls: Marks | None = None

    def parse(self, text: str, tools: Tools, *, is_reasoning: bool) -> ParsedAnswer:
        """
        Args:
            text: Special tokens included, but for the one that ends it.
            tools: That may be called; without any, nothing is taken for a call.
            is_reasoning: The prompt began the reasoning.
        """
        reasoning, rest, _ = self.split(text, is_reasoning=is_reasoning)
        if self.calls is None or not tools:
            return ParsedAnswer(rest, reasoning)
        read = _read_bare if self.calls is BARE else _read_blocks
        content, calls, malformed = read(rest, self.calls, tools)
        return ParsedAnswer(content, reasoning, tuple(calls), malformed)

    def split(self, text: str, *, is_reasoning: bool) -> tuple[str, str, bool]:
        """Reasoning, what follows it, and whether it goes on at the end. Calls within it are not made."""
        if self.reasoning is None or self.reasoning.close is None:
            return "", text, False
        begun = text.lstrip()
        has_mark = begun.startswith(self.reasoning.open)
        inner = begun.removeprefix(self.reasoning.open) if has_mark else text
        before, mark, after = inner.partition(self.reasoning.close)
        if mark:
            return before.strip(), after.lstrip(), False
        return (inner.strip(), "", True) if has_mark or is_reasoning else ("", text, False)


def _read_blocks(text: str, marks: Marks, tools: Tools) -> tuple[str, list[ToolCall], int]:
    first, *blocks = text.split(marks.open)
    content, calls, malformed = [first], [], 0
    for block in blocks:
        body, mark, after = block.partition(marks.close) if marks.close else (block, "", "")
        try:
            if marks.close and not mark and not _is_whole_list(body):
                raise ValueError("it does not end")
            calls += calls_in(body, tools)
            content.append(after)
        except ValueError:
            malformed += 1
            content.append(marks.open + block)
    rest = "".join(content)
    for word in marks.dropped if calls else ():
        rest = rest.replace(word, "")
    return rest.strip() if calls else rest, calls, malformed


def _read_bare(text: str, marks: Marks, tools: Tools) -> tuple[str, list[ToolCall], int]:
    body = text.strip()
    for word in marks.dropped:
        body = body.removeprefix(word)
    if not body.startswith("{"):
        return text, [], 0
    try:
        return "", calls_in(body, tools), 0
    except ValueError:
        return text, [], int(body.startswith(('{"name"', '{"type": "function"')))


def _is_whole_list(body: str) -> bool:
    """A JSON list ends itself: Granite 3 closes it with nothing."""
    try:
        return isinstance(json.loads(body), list)
    except (ValueError, RecursionError):
        return False


def element(answer: str, tag: str) -> str | None:
    """The text between the first ``<tag>`` and the last ``</tag>``; ``None`` where they are missing or out of order.

    Example:
        >>> element("<think>4?</think> <answer> 5 </answer>", "answer")
        ' 5 '
    """
    start, end = answer.find(f"<{tag}>") + len(tag) + 2, answer.rfind(f"</{tag}>")
    return answer[start:end] if f"<{tag}>" in answer and start <= end else None
