"""The policy's messages of an episode, and their parts: reasoning, tool calls, the answer. Text with special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemorl.types import Sample


@dataclass(frozen=True)
class Turn:
    """The tokens of one message of the policy, within its sample.

    Example:
        >>> Turn(begin=4, end=9, context=0).end
        9
    """

    begin: int
    end: int
    context: int
    """Where the text begins that it answers: the prompt, or what the environment said last"""


def turns(sample: Sample) -> list[Turn]:
    """The messages of a sample, in order: its runs of sampled tokens.

    Example:
        >>> from nemorl.types import Prompt, Score
        >>> mask = (False, True, True, False, True)
        >>> sample = Sample(Prompt(0, "?", (1,)), (1, 2, 3, 4, 5), mask, (0.0,) * 5, Score(0.0), "", "stop")
        >>> turns(sample)
        [Turn(begin=1, end=3, context=0), Turn(begin=4, end=5, context=3)]
    """
    found: list[Turn] = []
    mask, previous = (*sample.response_mask, False), 0
    begin: int | None = None
    for position, is_sampled in enumerate(mask):
        if is_sampled and begin is None:
            begin = position
        elif not is_sampled and begin is not None:
            found.append(Turn(begin, position, previous))
            begin, previous = None, position
    return found


def without_calls(text: str, tag: str) -> str:
    """The text without the whole tool calls in this element, which are JSON objects with a ``name``.

    Example:
        >>> without_calls('so: <tool_call>{"name": "add"}</tool_call>', "tool_call")
        'so: '
    """
    element = re.compile(rf"<{re.escape(tag)}>((?:(?!</?{re.escape(tag)}>).)*)</{re.escape(tag)}>", re.DOTALL)
    return element.sub(lambda found: "" if _is_call(found[1]) else found[0], text)


def _is_call(text: str) -> bool:
    """A JSON object with a ``name``, as chat templates write tool calls."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str) and bool(call["name"])


def parts(text: str, tags: tuple[str, str], call_tags: Sequence[str], *, is_open: bool) -> tuple[str, str, bool]:
    """(reasoning, answer, the message calls a tool) of a message.

    Reasoning ends with the first closing tag. Where there is none, everything is reasoning if the prompt or the message
    opened it. The answer is the rest without its tool calls.

    Args:
        text: The message.
        tags: What opens and closes reasoning.
        call_tags: Elements that tool calls are written in.
        is_open: The prompt opened reasoning.

    Example:
        >>> parts("so</think>4", ("<think>", "</think>"), ["tool_call"], is_open=True)
        ('so', '4', False)
    """
    opening, closing = tags
    reasoning, found, answer = text.partition(closing)
    if not found and not is_open and not text.lstrip().startswith(opening):
        reasoning, answer = "", text
    rest = answer
    for tag in call_tags:
        rest = without_calls(rest, tag)
    return reasoning.lstrip().removeprefix(opening), rest, rest != answer
