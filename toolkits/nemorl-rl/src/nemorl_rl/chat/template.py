"""TemplateCodec: messages as a model's own chat template writes them, and answers continued by what it adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from nemorl.errors import DataError
from nemorl.media import text_ids

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.chat.answers import AnswerFormat, call_marks, reasoning_marks
from nemorl_rl.chat.codec import ParsedAnswer, Spoken, Tools
from nemorl_rl.chat.media import with_items
from nemorl_rl.chat.messages import call_ids, plain_messages, require_tools
from nemorl_rl.chat.template_text import ASKED, CALL, RESULT, SAID, TOLD, TemplateText, probe_calls

if TYPE_CHECKING:
    from nemorl_media.family import Family

    from nemorl_rl.data.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 32
"""Of a prompt, read to see whether it began the reasoning."""


class TemplateCodec:
    """A ``ChatCodec`` for any chat template.

    What follows an answer is found as a difference: a short conversation is rendered with the new messages after an
    answer, and of the text everything up to the token that ends the assistant's turn is cut off. The short conversation
    stands for the real one, so that what a template does to earlier turns (dropping their reasoning) does not matter.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = TemplateText(tokenizer)

    @property
    def family(self) -> Family | None:
        return self._tokenizer.family

    def with_options(self, options: Mapping[str, Any]) -> TemplateCodec:
        return TemplateCodec(self._tokenizer.with_options(options))

    def render(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[int, ...]:
        plain = plain_messages(messages, self.family)
        require_tools(tools)
        self._require_shown(plain, tools)
        return tuple(with_items(self._template.text(plain, tools), plain, self._tokenizer))

    def extend(self, spoken: Spoken, messages: Sequence[ChatMessage], tools: Tools) -> tuple[int, ...] | None:
        added = self._added(spoken.messages, messages, tools)
        if added is None:
            return None
        last = spoken.answer_ids[-1] if spoken.answer_ids else None
        closing = () if last in self._end_ids else (*self._end_of_reasoning(spoken), *self._closing_ids)
        return (*closing, *self._after(last, added, messages))

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools) -> ParsedAnswer:
        text = self._text(self._without_end(token_ids))
        parsed = self._format.parse(text, tools, is_reasoning=self._begins_reasoning(prompt_ids))
        return ParsedAnswer(
            self._without_special(parsed.content),
            self._without_special(parsed.reasoning),
            parsed.tool_calls,
            parsed.malformed_tool_calls,
        )

    # Continuing an answer

    def _added(self, history: Sequence[ChatMessage], messages: Sequence[ChatMessage], tools: Tools) -> str | None:
        """The text after an answer's end. ``None`` where it cannot be told."""
        opening: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
        if history and history[0]["role"] in ("system", "developer"):
            opening.insert(0, {"role": history[0]["role"], "content": TOLD})
        for answer in _stand_ins(history, messages):
            try:
                before = self._template.text(opening, tools, prompt=False)
                alone = self._template.text([*opening, answer], tools, prompt=False)
                text = self._template.text([*opening, answer, *messages], tools)
            except DataError:
                continue
            return self._difference(before, alone, text)
        return None

    def _difference(self, before: str, alone: str, text: str) -> str | None:
        head = before[: before.find(ASKED) + len(ASKED)]
        if ASKED not in before or not text.startswith(head) or SAID not in text or SAID not in alone:
            return None
        rest, end = text[text.index(SAID) + len(SAID) :], alone[alone.index(SAID) + len(SAID) :]
        if self._end is None:
            end = end.removesuffix(self._template.close)
        elif self._end in end:
            end = end[: end.index(self._end) + len(self._end)]
        else:
            return None
        return rest[len(end) :] if rest.startswith(end) else None

    @cached_property
    def _end(self) -> str | None:
        """The token that ends the assistant's turn in the template; ``None`` where there is none."""
        close = self._template.close
        found = [token for token in self._tokens if token in close]
        return min(found, key=lambda token: (close.index(token), -len(token)), default=None)

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """Tokens that end an answer: after them nothing needs to be closed."""
        if self._end is not None:
            return self._tokenizer.stop_token_ids | {self._tokens[self._end]}
        asked = {"role": "user", "content": ASKED}
        added = [self._added([asked, CALL], [RESULT], ()), self._added([asked], [asked], ())]
        openings = {self._first_token(text) for text in added if text is not None}
        return self._tokenizer.stop_token_ids.union(token for token in openings if token is not None)

    @cached_property
    def _closing_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer that was cut."""
        if self._end is None:
            return ()
        close = self._template.close
        return tuple(self._tokenizer.encode_observation(close[: close.index(self._end) + len(self._end)]))

    def _end_of_reasoning(self, spoken: Spoken) -> tuple[int, ...]:
        """Tokens that end the reasoning of an answer that was cut within it."""
        marks = self._format.reasoning
        if marks is None or marks.close is None:
            return ()
        is_reasoning = self._begins_reasoning(spoken.prompt_ids)
        *_, goes_on = self._format.split(self._text(spoken.answer_ids), is_reasoning=is_reasoning)
        return tuple(self._tokenizer.encode_observation(marks.close)) if goes_on else ()

    def _after(self, last: int | None, added: str, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Tokens of the text of messages after an answer, as they are behind the token that ends it."""
        if self._end is not None:
            return tuple(with_items(self._end + added, messages, self._tokenizer))[1:]
        ids = tuple(with_items(added, messages, self._tokenizer))
        # GLM: what ends an answer is what begins the next message
        return ids[1:] if last is not None and self._first_token(added) == last else ids

    def _first_token(self, text: str) -> int | None:
        return next((number for token, number in self._tokens.items() if text.startswith(token)), None)

    @cached_property
    def _tokens(self) -> Mapping[str, int]:
        """Those that are one token wherever they stand."""
        found: dict[str, int] = self._tokenizer.inner.get_added_vocab()
        return found

    # Reading an answer

    @cached_property
    def _format(self) -> AnswerFormat:
        return AnswerFormat(reasoning_marks(self._template.source), call_marks(self._template.shown_call))

    def _begins_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        marks = self._format.reasoning
        return marks is not None and self._text(prompt_ids[-PROMPT_TAIL_TOKENS:]).rstrip().endswith(marks.open)

    def _without_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        ends = self._end_ids | self._special.keys()
        size = len(token_ids)
        while size and token_ids[size - 1] in ends:
            size -= 1
        return token_ids[:size]

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.inner.decode(
            text_ids(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _without_special(self, text: str) -> str:
        for token in self._special.values():
            text = text.replace(token, "")
        return text

    @cached_property
    def _special(self) -> Mapping[int, str]:
        """Tokens that are no text of the answer."""
        inner = self._tokenizer.inner
        added = {number: str(token) for number, token in inner.added_tokens_decoder.items() if token.special}
        return {**added, **dict(zip(inner.all_special_ids, inner.all_special_tokens, strict=True))}

    # Tools

    def _require_shown(self, messages: Sequence[ChatMessage], tools: Tools) -> None:
        calls = any("tool_calls" in message for message in messages)
        if tools and not self._template.shows_tools:
            missing = "the model's chat template does not show tools to the model"
        elif (tools or calls) and self._format.calls is None:
            missing = "the model's chat template writes tool calls in a form that is not known"
        else:
            return
        raise DataError(
            missing,
            fix="use a model whose template has tools, set policy.tokenizer.chat_template to one that has, or call the "
            "policy without tools and describe them in a message",
        )


def _stand_ins(history: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Answers to which these messages could be the next; the first that the template takes is meant."""
    results = [*takewhile(lambda message: message["role"] == "tool", messages)]
    if not results:
        return [{"role": "assistant", "content": SAID}]
    ids = [str(message.get("tool_call_id", "call")) for message in results]
    calls = history[-1].get("tool_calls", ()) if history else ()
    names = dict(zip(call_ids(history[-1]), (call["function"]["name"] for call in calls), strict=True)) if calls else {}
    named = [names.get(one, "tool") for one in ids]
    return [probe_calls(ids, named), probe_calls(ids[-1:], named[-1:])]
