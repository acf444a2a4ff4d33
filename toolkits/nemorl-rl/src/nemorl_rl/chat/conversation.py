"""Conversation: what one episode has said, as messages and as the tokens that were sampled."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from nemorl.errors import DataError
from nemorl.media import Media
from nemorl.types import Completion

from nemorl_rl.agents.contract import ChatMessage, ChatReply, ToolChoice
from nemorl_rl.chat.codec import ChatCodec, ParsedAnswer, Spoken, Tools, codec_with
from nemorl_rl.chat.media import media_in, process_items
from nemorl_rl.chat.messages import (
    call_ids,
    calls_key,
    message_key,
    plain_messages,
    prefix_keys,
    require_tools,
    tools_key,
)

MOST_OPTIONS = 8
"""Ways in which one episode may fill in the chat template."""
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as tokens, ready to be answered."""

    messages: tuple[ChatMessage, ...]
    """Plain (``nemorl_rl.chat.messages``)."""
    tools: Tools
    token_ids: tuple[int, ...]
    prefix_key: str
    """Of the messages."""
    realigned_tokens: int = 0
    """Sampled tokens of recognised answers that had to be written anew."""
    media: tuple[Media, ...] = ()
    """Images and sounds in them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """An answer that was sampled here, and all before it."""

    spoken: Spoken
    key: str
    """Of its message."""

    def likeness(self, messages: Sequence[ChatMessage]) -> int:
        """Messages with the same reasoning: of answers that are otherwise the same, the client may have said which."""
        pairs = zip(self.spoken.messages, messages, strict=False)
        return sum(ours.get("reasoning_content") == theirs.get("reasoning_content") for ours, theirs in pairs)

    def after(self, messages: Sequence[ChatMessage], prompt_ids: tuple[int, ...]) -> Spoken:
        """It, in another place."""
        return Spoken(messages, prompt_ids, self.spoken.answer_ids)


@dataclass(frozen=True, slots=True)
class _Known:
    """The part of a history that was said here."""

    start: _Turn | None
    """The longest one with which the history begins."""
    longest: int
    """Messages up to and including its answer."""
    by_calls: dict[int, _Turn]
    """Answers known by the ids of their calls, by position."""
    sizes: list[int]
    """Sampled tokens of each message that was said here, wherever that was."""
    key: str
    """Of the whole history."""

    @property
    def rewritten_tokens(self) -> int:
        """Sampled tokens that are written anew where recognised answers are spliced."""
        first = self.longest if self.start is not None else 0
        return sum(size for at, size in enumerate(self.sizes) if at >= first and at not in self.by_calls)


class Conversation:
    """Used by one episode, from any thread.

    An answer is recognised by the ids of its tool calls, which were minted here; one without calls by its content,
    after the same messages. What is recognised goes into the next prompt as the tokens that were sampled.
    """

    def __init__(self, codec: ChatCodec, seed: int) -> None:
        """
        Args:
            codec: Of the policy's model.
            seed: From which ids of tool calls are minted.
        """
        self._codec, self._seed = codec, seed
        self._minted = count()
        self._lock = threading.Lock()
        self._by_prefix: defaultdict[tuple[str, str], list[_Turn]] = defaultdict(list)
        """By the keys of the tools and of all messages, the answer's included."""
        self._tokens_by_key: dict[str, int] = {}
        self._by_calls: dict[tuple[str, ...], _Turn] = {}
        self._others: dict[str, Conversation] = {}

    def speaking(self, template_options: str | None) -> Conversation:
        """The conversation whose template is given these variables: this one where there are none.

        Args:
            template_options: A JSON object, written in one way (``CallOptions.template_options``).

        Raises:
            DataError: The episode has asked in too many ways.
        """
        if template_options is None:
            return self
        with self._lock:
            found = self._others.get(template_options)
            if found is None:
                if len(self._others) >= MOST_OPTIONS:
                    raise DataError(f"more than {MOST_OPTIONS} ways to fill in the chat template", fix="use fewer")
                codec = codec_with(self._codec, template_options)
                digest = hashlib.blake2b(f"{self._seed}/{template_options}".encode(), digest_size=8).digest()
                seed = int.from_bytes(digest)
                found = self._others[template_options] = Conversation(codec, seed)
            return found

    def shown_prompt(
        self, messages: Sequence[ChatMessage], tools: Tools, limit: int, require_wanted: Callable[[], object]
    ) -> ChatPrompt:
        """``prompt`` of messages with images and sounds, which take their time.

        Args:
            messages: The whole history.
            tools: As in ``prompt``.
            limit: Tokens that the prompt may have.
            require_wanted: Raises where nobody waits for the prompt.

        Raises:
            ContextOverflowError: The items alone have more tokens.
            DataError: As ``prompt`` does.
        """
        plain = plain_messages(messages, self._codec.family)
        process_items(plain, self._codec.family, limit, require_wanted)
        return self.prompt(plain, tools)

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> ChatPrompt:
        """The tokens of a history: recognised answers as they were sampled, the rest as the template writes it.

        Raises:
            DataError: The history cannot be written: no text, an order that the template refuses, tools that it does
                not show.
        """
        plain = plain_messages(messages, self._codec.family)
        if not plain:
            raise DataError("there are no messages", fix="send at least one message")
        require_tools(tools)
        known = self._recognised(plain, tools)
        ids = self._spliced(plain, tools, known)
        if ids is not None:
            return ChatPrompt(plain, tools, ids, known.key, known.rewritten_tokens, media_in(plain))
        ids = self._codec.render(plain, tools)
        return ChatPrompt(plain, tools, ids, known.key, sum(known.sizes), media_in(plain))

    def reply(
        self,
        prompt: ChatPrompt,
        completion: Completion,
        tool_choice: ToolChoice = "auto",
        stop: Sequence[str] = (),
        *,
        is_plain: bool = False,
    ) -> ChatReply:
        """The answer as a message, remembered to be recognised.

        Args:
            prompt: Of this conversation.
            completion: What the engine sampled after it.
            tool_choice: Whether tools were to be called.
            stop: Strings that end an answer and are not part of its content.
            is_plain: It is text as a whole, also where the prompt began the reasoning.
        """
        if is_plain:
            parsed = self._codec.parse(completion.token_ids, (), ())
        else:
            parsed = self._codec.parse(completion.token_ids, prompt.token_ids, prompt.tools)
        broke = bool(prompt.tools) and _breaks(parsed, tool_choice)
        if tool_choice == "none" and parsed.tool_calls:
            parsed = self._codec.parse(completion.token_ids, prompt.token_ids, ())
        message = self._message(parsed, stop)
        self._remember(prompt, message, completion)
        reason: FinishReason = "tool_calls" if parsed.tool_calls else "stop"
        if completion.finish_reason == "length":
            reason = "length"
        return ChatReply(message, completion, len(prompt.token_ids), reason, parsed.malformed_tool_calls, broke)

    # Recognising

    def _recognised(self, messages: Sequence[ChatMessage], tools: Tools) -> _Known:
        with self._lock:
            keys, by_calls = [], {}
            for at, message in enumerate(messages):
                turn = self._by_calls.get(call_ids(message))
                if turn is not None and _is_same(turn.spoken.messages[-1], message):
                    by_calls[at] = turn
                keys.append(turn.key if at in by_calls and turn is not None else message_key(message))
            prefixes, of_tools = prefix_keys(keys), tools_key(tools)
            longest = next((n for n in range(len(messages), 0, -1) if (of_tools, prefixes[n]) in self._by_prefix), 0)
            alike = self._by_prefix[of_tools, prefixes[longest]] if longest else []
            sizes = [self._tokens_by_key.get(key, 0) for key in keys]
        start = max(enumerate(alike), key=lambda found: (found[1].likeness(messages), found[0]), default=(0, None))[1]
        return _Known(start, longest, by_calls, sizes, prefixes[-1])

    def _spliced(self, messages: Sequence[ChatMessage], tools: Tools, known: _Known) -> tuple[int, ...] | None:
        """Recognised answers as sampled, each continued by what follows it; ``None`` where nothing is recognised, or
        the codec cannot continue one."""
        begun = self._begun(messages, tools, known)
        if begun is None:
            return None
        spoken, at = begun
        while True:
            until = min((position for position in known.by_calls if position >= at), default=len(messages))
            more = self._codec.extend(spoken, messages[at:until], tools)
            if more is None:
                return None
            ids = (*spoken.token_ids, *more)
            if until == len(messages):
                return ids
            at = until + 1
            spoken = known.by_calls[until].after(messages[:at], ids)

    def _begun(self, messages: Sequence[ChatMessage], tools: Tools, known: _Known) -> tuple[Spoken, int] | None:
        """The first recognised answer, and how many messages lead up to it and include it."""
        if known.start is not None:
            return known.start.spoken, known.longest
        first = min(known.by_calls, default=0)
        if first == 0:  # there is none, or nothing before it
            return None
        try:
            prompt_ids = self._codec.render(messages[:first], tools)
        except DataError:  # the template refuses this part: whether it takes the whole is another question
            return None
        return known.by_calls[first].after(messages[: first + 1], prompt_ids), first + 1

    # Remembering

    def _message(self, parsed: ParsedAnswer, stop: Sequence[str]) -> dict[str, Any]:
        content = parsed.content
        for word in stop:
            content = content.partition(word)[0]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": self._mint(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        return message

    def _mint(self) -> str:
        with self._lock:
            number = next(self._minted)
        return "call_" + hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=12).hexdigest()

    def _remember(self, prompt: ChatPrompt, message: ChatMessage, completion: Completion) -> None:
        [plain] = plain_messages([message])
        ids = call_ids(plain)
        key = f"calls {ids}" if ids else message_key(plain)
        turn = _Turn(Spoken((*prompt.messages, plain), prompt.token_ids, completion.token_ids), key)
        with self._lock:
            self._by_prefix[tools_key(prompt.tools), prefix_keys([key], prompt.prefix_key)[-1]].append(turn)
            self._tokens_by_key[key] = len(completion.token_ids)
            if ids:
                self._by_calls[ids] = turn


def _is_same(ours: ChatMessage, theirs: ChatMessage) -> bool:
    """The client did not rewrite the calls, nor what was said beside them. It may have left that out."""
    said = str(theirs["content"]).strip()  # parts, where the client has put images into it
    return calls_key(ours) == calls_key(theirs) and said in ("", ours["content"].strip())


def _breaks(parsed: ParsedAnswer, tool_choice: ToolChoice) -> bool:
    names = {call.name for call in parsed.tool_calls}
    if tool_choice == "auto":
        return False
    if tool_choice == "none":
        return bool(names)
    return not names if tool_choice == "required" else names != {tool_choice}
