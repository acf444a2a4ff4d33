"""RowChat: which tokens of a finished conversation the assistant wrote, for any chat template.

A turn is what ``{% generation %}`` encloses, where the template has it. Else it is what the template writes for that
message (``provenance``) without the words that open it, which a generation prompt would have written, and with the
token that ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

from nemorl.errors import DataError, ForeignError, boundary
from nemorl.media import Media, MediaKind

from nemorl_rl.chat.answers import REASONING
from nemorl_rl.chat.codec import Tools
from nemorl_rl.chat.media import media_in, with_items, written
from nemorl_rl.chat.provenance import MarkedTemplate, Segment
from nemorl_rl.chat.rows import row_messages, text_of
from nemorl_rl.chat.template_text import ASKED, CALL, REASONING_NAMES, RESULT, SAID, TemplateText

if TYPE_CHECKING:
    from nemorl_rl.data.tokenizer import Tokenizer

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SpokenTokens:
    """A conversation as tokens.

    Example:
        >>> SpokenTokens([5, 6, 7], [0, None, 0]).start(0)
        0
    """

    ids: list[int]
    turns: list[int | None]
    """Of each token, the number of the assistant's message that it is learnt for."""
    media: tuple[Media, ...] = ()
    """Images and sounds in them"""

    def start(self, message: int) -> int:
        """Place of the first token of an assistant's message; the end where it has none."""
        return self.turns.index(message) if message in self.turns else len(self.ids)


class RowChat:
    """Finds the assistant's words. One per tokenizer; it keeps what it has learnt of the template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = TemplateText(tokenizer)

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> SpokenTokens:
        """
        Args:
            messages: Of a row, the last one an assistant's.
            tools: That may be called.

        Raises:
            BackendError: The model has no chat template.
            DataError: The template refuses them or does not show one of them.
        """
        given = row_messages(messages, self.reasoning_names)
        self._require_tools(tools)
        shown = self._text.shown(given)
        text, segments = self._render(shown, tools)
        _require_shown(shown, text, segments)
        spans = {
            number: self._turn(number, text, segments)
            for number, message in enumerate(shown)
            if message["role"] == "assistant"
        }
        if GENERATION.search(self._template_for(tools)):
            spans = self._marked_by_template(shown, tools, text, spans)
        else:
            last = spans[len(shown) - 1]
            text += "" if self._ends_itself else self._next_tokens["tool_calls" in shown[-1]]
            last.append((last[-1][1], len(text)))
        items = written(text, given, self._tokenizer)
        if items is None:
            return self._tokens(text, spans)
        moved = {n: [(items.moved(start), items.moved(end)) for start, end in parts] for n, parts in spans.items()}
        spoken = self._tokens(items.text, moved)
        parts = items.filled(spoken.ids)
        turns = [turn for turn, part in zip(spoken.turns, parts, strict=True) for _ in part]
        return SpokenTokens([*chain.from_iterable(parts)], turns, media_in(given))

    @property
    def reasoning_names(self) -> tuple[str, ...]:
        """Fields of an answer that the template shows as its reasoning."""
        return self._text.reasoning_names

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        """Tokens of messages, ending where the assistant begins to speak. Items stand in them (``chat.media``).

        Raises:
            BackendError: The model has no chat template.
            DataError: The template refuses them or does not show the tools.
        """
        given = row_messages(messages, self.reasoning_names)
        shown = self._text.shown(given)
        self._require_tools(tools)
        return with_items(self._text.rendered(shown, tools, prompt=True), given, self._tokenizer)

    def written(self, kind: MediaKind) -> str:
        """The text that the template writes for an image or a sound.

        Raises:
            DataError: It shows none.
        """
        parts = [{"type": "text", "text": ASKED}, {"type": kind}, {"type": "text", "text": SAID}]
        text = self._text.rendered([{"role": "user", "content": parts}], ())
        found = text.partition(ASKED)[2].partition(SAID)[0].strip("\n")
        if not found:
            raise DataError(f"the model's chat template does not show {kind}s", fix="use one that does")
        return found

    def _require_tools(self, tools: Tools) -> None:
        if tools and not self._text.shows_tools:
            raise DataError(
                "a row has tools, and the model's chat template does not show tools to the model",
                fix="use a model whose template has tools, set policy.tokenizer.chat_template to one that has, or drop "
                "the column `tools` and describe them in a message",
            )

    def _render(
        self, shown: Sequence[Mapping[str, Any]], tools: Tools, *, prompt: bool = False
    ) -> tuple[str, list[Segment]]:
        expected = self._text.rendered(shown, tools, prompt=prompt)
        marked = MarkedTemplate(self._template_for(tools))
        with boundary("the chat template"):
            text, segments = marked.render(shown, **self._variables(tools, prompt))
        if text != expected:
            raise DataError(
                "the assistant's words cannot be located: the chat template works on whole messages after writing them",
                fix="enclose the assistant's words in {% generation %} … {% endgeneration %} in a template of your "
                "own (policy.tokenizer.chat_template), or give rows of `prompt` and `response` as text",
            )
        return text, segments

    def _variables(self, tools: Tools, prompt: bool) -> dict[str, Any]:
        listed = [dict(tool) for tool in tools] or None
        given = {**self._tokenizer.inner.special_tokens_map, **self._tokenizer.template_kwargs}
        return {"tools": listed, "documents": None, "add_generation_prompt": prompt, **given}

    def _template_for(self, tools: Tools) -> str:
        return str(self._tokenizer.inner.get_chat_template(None, list(tools) or None))

    # One turn

    def _turn(self, number: int, text: str, segments: Sequence[Segment]) -> list[Span]:
        (start, end), *rest = ((one.start, one.end) for one in segments if one.message == number)
        spans = [(start + max((self._opening(text[start:end], cue) for cue in self._cues), default=0), end), *rest]
        if not self._ends_itself:
            end = spans[-1][1]
            spans.append((end, end + len(self._token_at(text, end))))
        return spans

    def _opening(self, said: str, cue: str) -> int:
        """Characters of the words that open an answer: all of them, or those up to where one of its tokens is."""
        begin, wanted = len(said) - len(said.lstrip()), cue.lstrip()
        same = _common(said[begin:], wanted)
        if same < len(wanted.rstrip()):
            starts = [(wanted.find(token), len(token)) for token in self._added if token in wanted]
            ends = [place for start, size in starts for place in (start, start + size)]
            same = max((place for place in ends if place <= same), default=0)
        return begin + same if same else 0

    @cached_property
    def _cues(self) -> list[str]:
        """Texts that open an answer to a user's message, or to the result of a tool. Reasoning is the answer's own."""
        asked = {"role": "user", "content": ASKED}
        return [*self._openings([asked]), *self._openings([asked, CALL, RESULT])]

    def _openings(self, probe: Sequence[Mapping[str, Any]]) -> list[str]:
        try:
            shown = self._text.shown(probe)
            without = self._text.rendered(shown, ())
            text, segments = self._render(shown, (), prompt=True)
        except (DataError, ForeignError):
            return []
        last = max((one.end for one in segments if one.message is not None), default=len(text))
        found = [text[_common(text, without) :], text[last:]]
        for marks in REASONING:
            found = [cue.partition(marks.open)[0] for cue in found]
        return [cue for cue in found if cue.strip()]

    # What ends a turn

    @cached_property
    def _ends_itself(self) -> bool:
        """A token ends the assistant's turn, or none does. Else what begins the next message does (GLM)."""
        return any(token in self._text.close for token in self._added) or not self._next_tokens[False]

    @cached_property
    def _next_tokens(self) -> dict[bool, str]:
        """The token that begins a user's message after an answer, and that of a tool's result after a call."""
        asked = {"role": "user", "content": ASKED}
        said = {"role": "assistant", "content": SAID}
        return {False: self._begins([asked, said, asked]), True: self._begins([asked, CALL, RESULT])}

    def _begins(self, probe: Sequence[Mapping[str, Any]]) -> str:
        try:
            text, segments = self._render(self._text.shown(probe), ())
        except (DataError, ForeignError):
            return ""
        ends = [one.end for one in segments if one.message == 1]
        return self._token_at(text, ends[-1]) if ends else ""

    def _token_at(self, text: str, place: int) -> str:
        return max((token for token in self._added if text.startswith(token, place)), key=len, default="")

    @cached_property
    def _added(self) -> Mapping[str, int]:
        found: dict[str, int] = self._tokenizer.inner.get_added_vocab()
        return found

    # Templates that say themselves

    def _marked_by_template(
        self, shown: Sequence[Mapping[str, Any]], tools: Tools, text: str, spans: Mapping[int, list[Span]]
    ) -> dict[int, list[Span]]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # its annotation says str, it returns two lists
        with boundary("the chat template"):
            _, enclosed = render(
                [[dict(message) for message in shown]],
                chat_template=self._template_for(tools),
                return_assistant_tokens_mask=True,
                **self._variables(tools, False),
            )
        return {number: list(_within(enclosed[0], parts)) for number, parts in spans.items()}

    # Tokens

    def _tokens(self, text: str, spans: Mapping[int, list[Span]]) -> SpokenTokens:
        inner = self._tokenizer.inner
        owners: list[int | None] = [None] * (len(text) + 1)
        for number, parts in spans.items():
            for start, end in parts:
                owners[start:end] = [number] * (end - start)
        if not inner.is_fast:
            return self._tokens_by_parts(text, owners)
        encoded = inner(text, add_special_tokens=False, return_offsets_mapping=True)
        turns = [
            next((owner for owner in owners[start : max(end, start + 1)] if owner is not None), None)
            for start, end in encoded["offset_mapping"]
        ]
        return SpokenTokens(list(encoded["input_ids"]), turns)

    def _tokens_by_parts(self, text: str, owners: Sequence[int | None]) -> SpokenTokens:
        """For tokenizers that do not say where their tokens are."""
        ids: list[int] = []
        turns: list[int | None] = []
        start = 0
        for end in range(1, len(text) + 1):
            if end == len(text) or owners[end] != owners[start]:
                part = self._tokenizer.encode_observation(text[start:end])
                ids += part
                turns += [owners[start]] * len(part)
                start = end
        if ids != self._tokenizer.encode_observation(text):
            raise DataError(
                "the assistant's tokens cannot be located: the model's tokenizer is a slow one, and makes tokens that "
                "lie on both sides of where a turn begins or ends",
                fix="use a model with a fast tokenizer (tokenizer.json)",
            )
        return SpokenTokens(ids, turns)


def _common(left: str, right: str) -> int:
    """Characters with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _within(enclosed: Sequence[Span], parts: Sequence[Span]) -> Iterator[Span]:
    for start, end in parts:
        for first, last in enclosed:
            if max(start, first) < min(end, last):
                yield max(start, first), min(end, last)


def _taken_apart(message: Mapping[str, Any]) -> tuple[str, str]:
    """Reasoning and text of an answer; the former is a field, or stands before a mark in the content."""
    field = next((message[name] for name in REASONING_NAMES if isinstance(message.get(name), str)), "")
    content = text_of(message)
    for marks in REASONING:
        before, mark, after = content.rpartition(marks.close or "\0")
        if mark:
            return (field or before.rpartition(marks.open)[2]).strip(), after.strip()
    return field.strip(), content.strip()


def _require_shown(shown: Sequence[Mapping[str, Any]], text: str, segments: Sequence[Segment]) -> None:
    """
    Raises:
        DataError: The template writes nothing for a message, or leaves out something of an answer that is learnt.
    """
    written: dict[int | None, str] = {}
    for one in segments:
        written[one.message] = written.get(one.message, "") + text[one.start : one.end]
    for number, message in enumerate(shown):
        own, words = written.get(number, ""), text_of(message).strip()
        if not own and (message["role"] == "assistant" or (words and words not in text)):
            raise _left_out(f"message {number} (role {message['role']!r})")
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in own:
                raise _left_out(f"the call of {call['function']['name']!r} in message {number}")
        _, said = _taken_apart(message)
        if "tool_calls" in message and said not in own:
            raise _left_out(f"the text beside the calls of message {number} ({said[:60]!r})")
    thought, _ = _taken_apart(shown[-1])
    if thought not in written.get(len(shown) - 1, ""):
        raise _left_out("the reasoning of the last answer, which is to be learnt")


def _left_out(what: str) -> DataError:
    return DataError(
        f"the model's chat template does not show {what}",
        fix="leave it out of the rows, or set policy.tokenizer.chat_template to a template that shows it",
    )
