"""TemplateText: a chat template as it is, asked what it can show and in which form it wants messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nemorl.errors import DataError, ForeignError

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.chat.codec import Tools
from nemorl_rl.chat.media import media_in
from nemorl_rl.data.tokenizer import Tokenizer, encodable

ASKED, SAID, TOLD = "qUestion8471", "aNswer8472", "sYstem8473"
"""Words that no template and no message holds, by which a place in a rendered text is found."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's reasoning in datasets and templates."""
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pRobe8474",
        "description": "pRobe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a template wants a message that calls tools."""

    arguments_as_text: bool = False
    """As JSON text; else as a mapping."""
    empty_as_none: bool = False
    """Content that is empty is ``None``."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits (Mistral)."""


FORMS = tuple(
    MessageForm(arguments_as_text=text, empty_as_none=none, short_ids=short)
    for short in (False, True)
    for text in (False, True)
    for none in (False, True)
)


class TemplateText:
    """Renders plain messages (``nemorl_rl.chat.messages``) to text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def source(self) -> str:
        """The template itself."""
        return str(self._tokenizer.inner.chat_template or "")

    @cached_property
    def shows_tools(self) -> bool:
        """The tools that may be called come to the model's sight."""
        text = self._tried([_user(ASKED)], [PROBE_TOOL], form=FORMS[0])
        return text is not None and "pRobe8474" in text

    @cached_property
    def shown_call(self) -> str:
        """Its text of a call; empty where it shows none."""
        text = self._tried([_user(ASKED), CALL], [PROBE_TOOL], form=self._form, prompt=False)
        return text.rpartition(ASKED)[2] if text is not None and SAID in text else ""

    @cached_property
    def close(self) -> str:
        """The text after the assistant's words at the end of a conversation."""
        text = self._tried([_user(ASKED), {"role": "assistant", "content": SAID}], [], form=FORMS[0], prompt=False)
        return text.rpartition(SAID)[2] if text is not None and SAID in text else ""

    @cached_property
    def _form(self) -> MessageForm:
        """The first in which a call and its result are shown."""
        for form in FORMS:
            text = self._tried([_user(ASKED), CALL, RESULT], [PROBE_TOOL], form=form)
            if text is not None and SAID in text and TOLD in text:
                return form
        return FORMS[0]

    @cached_property
    def reasoning_names(self) -> tuple[str, ...]:
        """Fields of an answer that it shows as the reasoning, at least where the answer calls a tool (Gemma 4)."""
        answers = ({"role": "assistant", "content": SAID}, CALL)
        return tuple(
            name
            for name in REASONING_NAMES
            if any(TOLD in self._rendering(self.shown([_user(ASKED), {**answer, name: TOLD}])) for answer in answers)
        )

    @cached_property
    def _wants_parts(self) -> bool:
        """It reads contents as lists of parts only."""
        return ASKED not in self._rendering([_user(ASKED)]) and ASKED in self._rendering([_in_parts(ASKED)])

    @cached_property
    def _takes_parts(self) -> bool:
        """It reads contents that are lists of parts, and writes them as text."""
        text = self._rendering([_in_parts(ASKED, TOLD)])
        return ASKED in text and TOLD in text and "'text'" not in text and '"text"' not in text

    def _rendering(self, shown: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.rendered(shown, [])
        except DataError:
            return ""

    def text(self, messages: Sequence[ChatMessage], tools: Tools, *, prompt: bool = True) -> str:
        """
        Args:
            messages: Plain ones.
            tools: That may be called.
            prompt: End where the assistant begins to speak.

        Raises:
            DataError: The template refuses them.
        """
        return self.rendered(self.shown(messages), tools, prompt=prompt)

    def shown(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Messages in the form in which the template reads them."""
        has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        form = self._form if has_calls else FORMS[0]
        return [self._shown(message, form) for message in messages]

    def rendered(self, shown: Sequence[Mapping[str, Any]], tools: Tools, *, prompt: bool = False) -> str:
        """The template's text of messages in this form.

        Raises:
            DataError: It refuses them.
        """
        try:
            return encodable(self._tokenizer.chat_text(shown, tools, add_generation_prompt=prompt))
        except ForeignError as error:
            roles = ", ".join(str(message["role"]) for message in shown[-8:])
            raise DataError(
                f"the chat template refuses the messages (the last roles are {roles}): {error.__cause__}",
                fix="send messages in an order that the model's template knows, or set policy.tokenizer.chat_template",
            ) from error

    def _tried(
        self, messages: Sequence[ChatMessage], tools: Tools, *, form: MessageForm, prompt: bool = True
    ) -> str | None:
        try:
            return self.rendered([self._shown(message, form) for message in messages], tools, prompt=prompt)
        except DataError:
            return None

    def _shown(self, message: ChatMessage, form: MessageForm) -> dict[str, Any]:
        shown = dict(message)
        if message["role"] == "developer" and "developer" not in self.source:
            shown["role"] = "system"
        if form.short_ids and "tool_call_id" in message:
            shown["tool_call_id"] = _short(message["tool_call_id"])
        if "tool_calls" in message:
            shown["tool_calls"] = [_shown_call(call, form) for call in message["tool_calls"]]
            shown["content"] = message["content"] or (None if form.empty_as_none else "")
        content = shown["content"]
        if isinstance(content, str) and self._wants_parts:
            shown["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self._takes_parts and not media_in([message]):
            shown["content"] = "\n".join(str(part["text"]) for part in content)
        return shown


def probe_calls(ids: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """An answer that calls tools; in the last one's arguments, and nowhere else, stands ``SAID``."""
    calls = []
    for number, (own, name) in enumerate(zip(ids, names, strict=True)):
        arguments = json.dumps({"x": SAID if number == len(ids) - 1 else "y"})
        calls.append({"id": own, "type": "function", "function": {"name": name, "arguments": arguments}})
    return {"role": "assistant", "content": "", "tool_calls": calls}


CALL = probe_calls(["call_0"], [PROBE_TOOL["function"]["name"]])
"""A call of ``PROBE_TOOL``."""
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": TOLD}
"""Its answer."""


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _in_parts(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def _shown_call(call: Mapping[str, Any], form: MessageForm) -> dict[str, Any]:
    function = dict(call["function"])
    if not form.arguments_as_text:
        with suppress(ValueError, RecursionError):  # a model's mistake is shown as it was made
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, **({"id": _short(call.get("id", ""))} if form.short_ids else {}), "function": function}


def _short(own: str) -> str:
    return hashlib.blake2b(own.encode(), digest_size=8).hexdigest()[:9]
