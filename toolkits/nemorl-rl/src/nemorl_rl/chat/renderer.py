"""RendererCodec: messages and answers by the package ``renderers``, which knows how each model family speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError, DataError, ForeignError, UsageError, boundary

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.chat.calls import require_json
from nemorl_rl.chat.codec import ParsedAnswer, Spoken, ToolCall, Tools
from nemorl_rl.chat.messages import plain_messages, require_tools

if TYPE_CHECKING:
    from nemorl_rl.data.tokenizer import Tokenizer

ONLY_THERE = {
    "<|channel|>": "gpt-oss",
    "<|tool_call>": "gemma4",
    "<|tool_calls_section_begin|>": "kimi-k2",
    "<minimax:tool_call>": "minimax-m2",
    "｜DSML｜": "deepseek-v4",
}
"""Words of chat templates whose answers nemorl does not read itself, and who does."""


def renderer_of(template: str) -> str | None:
    """The renderer that a chat template needs; ``None`` where ``TemplateCodec`` does."""
    return next((name for word, name in ONLY_THERE.items() if word in template), None)


class RendererCodec:
    """A ``ChatCodec`` of a model family. Earlier reasoning stays where it was sampled, as with any codec here."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """
        Args:
            tokenizer: Of the model.
            name: Of a renderer, as the package calls it.

        Raises:
            BackendError: The package is not installed, or the tokenizer is none of this family.
            UsageError: There is no such renderer.
        """
        self._tokenizer, self._name, self._owner = tokenizer, name, f"the renderer {name!r}"
        self._renderer = _load(tokenizer, name)

    @property
    def family(self) -> None:
        """The package writes text alone."""

    def with_options(self, options: Mapping[str, Any]) -> RendererCodec:
        return RendererCodec(self._tokenizer.with_options(options), self._name)

    def render(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[int, ...]:
        plain = plain_messages(messages)
        require_tools(tools)
        try:
            with boundary(self._owner):
                return tuple(self._renderer.render_ids(list(plain), tools=_listed(tools), add_generation_prompt=True))
        except ForeignError as error:
            raise DataError(f"messages cannot be written: {error}", fix="send messages that the model knows") from error

    def extend(self, spoken: Spoken, messages: Sequence[ChatMessage], tools: Tools) -> tuple[int, ...] | None:
        if not messages:
            return None
        said, new = spoken.token_ids, [dict(message) for message in messages]
        prompt_ids, answer_ids = list(spoken.prompt_ids), list(spoken.answer_ids)
        try:
            with boundary(self._owner):
                bridged = self._renderer.bridge_to_next_turn(prompt_ids, answer_ids, new, tools=_listed(tools))
        except ForeignError:  # it refuses these messages, and may take them in the whole
            return None
        if bridged is None or tuple(bridged.token_ids[: len(said)]) != said:
            return None
        return tuple(bridged.token_ids[len(said) :])

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools) -> ParsedAnswer:
        ids, before = list(token_ids), list(prompt_ids)
        try:
            with boundary(self._owner):
                parsed = self._renderer.parse_response(ids, tools=_listed(tools), prompt_ids=before)
        except ForeignError:  # of what a model writes, something may be beyond it
            return ParsedAnswer(self._tokenizer.decode(ids))
        reasoning = parsed.reasoning_content or ""
        if not tools:
            return ParsedAnswer(parsed.content, reasoning)
        calls = [_call(call) for call in parsed.tool_calls if _is_whole(call)]
        broken = [call.raw for call in parsed.tool_calls if not _is_whole(call)]
        content = "\n".join(filter(None, [parsed.content, *(raw for raw in broken if raw not in parsed.content)]))
        return ParsedAnswer(content, reasoning, tuple(calls), len(broken))


def _load(tokenizer: Tokenizer, name: str) -> Any:
    try:
        import renderers
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the answers of this model are read by the package renderers ({name!r}), which is not installed",
            fix="pip install 'nemorl-rl[agents]'",
        ) from error
    try:
        config = renderers.config_from_name(name)
    except (KeyError, ValueError) as error:
        raise UsageError(f"there is no renderer {name!r}: {error}", fix="see the package renderers") from error
    with boundary(f"the renderer {name!r}"):
        config = type(config)(thinking_retention="all")
        return renderers.create_renderer(tokenizer.inner, config, chat_template_kwargs=tokenizer.template_kwargs)


def _listed(tools: Tools) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None


def _is_whole(call: Any) -> bool:
    """It can be read. A tool of another name is the client's to refuse."""
    if not call.name or call.status not in ("ok", "unknown_tool"):
        return False
    try:
        require_json(_call(call).arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _call(call: Any) -> ToolCall:
    arguments = call.arguments
    return ToolCall(
        call.name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    )
