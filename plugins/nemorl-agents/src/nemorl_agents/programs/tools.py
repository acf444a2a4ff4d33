"""Tools that the policy may call: Python functions, and those of MCP servers. What a model asks wrongly is no error."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError
from nemorl.media import MediaKind
from nemorl_rl.environments.loop_thread import in_thread
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from nemorl_agents.programs.results import Result, as_result, cut, seen


@dataclass(frozen=True)
class Tool:
    """One tool: what the policy is told of it, and what it does."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    call: Callable[[dict[str, Any]], Awaitable[Result]]
    """Arguments -> result. What it raises is told to the policy."""

    @property
    def spec(self) -> dict[str, Any]:
        """As OpenAI's chat completions write it."""
        told = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": told}


class ToolError(Exception):
    """Said by a tool itself; the policy gets its words."""


class Toolbox:
    """The tools of one episode.

    >>> def add(a: int, b: int) -> int:
    ...     "The sum of a and b."
    ...     return a + b
    >>> box = Toolbox([function_tool(add)])
    >>> asyncio.run(box.call("add", '{"a": 1, "b": 2}'))
    '3'
    >>> asyncio.run(box.call("ad", "{}"))
    "error: there is no tool 'ad'. Did you mean 'add'?"
    """

    def __init__(
        self,
        tools: Iterable[Tool],
        *,
        timeout_s: float = 60.0,
        max_result_chars: int = 20_000,
        kinds: Collection[MediaKind] = (),
    ) -> None:
        """
        Args:
            tools: Under distinct names.
            timeout_s: Of one call.
            max_result_chars: Longer results are cut; images and sounds never are.
            kinds: That the model sees or hears. Of others it is told that they are there.

        Raises:
            UsageError: Two have one name.
        """
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise UsageError(f"two tools are named {tool.name!r}", fix="rename one, or leave one server out")
            self._tools[tool.name] = tool
        self._timeout_s, self._max_result_chars, self._kinds = timeout_s, max_result_chars, frozenset(kinds)
        self.calls = 0
        """Answered so far."""
        self.errors = 0
        """Of them, those answered by an error."""

    @property
    def specs(self) -> list[dict[str, Any]]:
        """As OpenAI's chat completions write them: for ``policy.chat(…, tools=box.specs)``."""
        return [tool.spec for tool in self._tools.values()]

    async def call(self, name: str, arguments: str) -> Result:
        """The result as text, or as parts where it has images or sounds; or ``error: …``.

        Args:
            name: As the policy wrote it.
            arguments: JSON, as the policy wrote it.
        """
        self.calls += 1
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                result = await self._call(name, arguments)
        except ToolError as error:
            return self._failed(str(error))
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():  # it may have a limit of its own
                return self._failed(f"{name} took longer than {self._timeout_s:g} seconds")
            logging.getLogger(__name__).debug("tool %s failed", name, exc_info=True)
            return self._failed(f"{type(error).__name__}: {error}")
        return seen(result, self._kinds, self._max_result_chars)

    async def messages(self, tool_calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answers to the calls of one message, in order; the calls run at the same time."""
        asked = [*tool_calls]
        results = await asyncio.gather(
            *(self.call(str(one["function"]["name"]), str(one["function"]["arguments"])) for one in asked)
        )
        return [
            {"role": "tool", "tool_call_id": one["id"], "content": result}
            for one, result in zip(asked, results, strict=True)
        ]

    async def _call(self, name: str, arguments: str) -> Result:
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"there is no tool {name!r}. {did_you_mean(name, self._tools) or f'Tools: {known}'}")
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments of {name} are no JSON: {error}") from error
        if not isinstance(given, dict):
            raise ToolError(f"the arguments of {name} are no JSON object")
        return await tool.call(given)

    def _failed(self, what: str) -> str:
        self.errors += 1
        return cut(f"error: {what}", self._max_result_chars)


def function_tool(function: Callable[..., Any]) -> Tool:
    """A Python function as a tool: its name, its docstring, and its parameters by their annotations. It may be async,
    and return images (of Pillow, or ``nemorl.media.Media``), sounds, and lists of these and texts.

    Raises:
        UsageError: It has parameters that no JSON object could fill.
    """
    fields: dict[str, Any] = {}
    name = getattr(function, "__name__", type(function).__name__)
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"tool {name!r} has a parameter *{parameter.name}", fix="give each parameter a name")
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[parameter.name] = (annotation, ... if parameter.default is parameter.empty else parameter.default)
    model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    schema = model.model_json_schema()
    schema.pop("title", None)

    async def call(given: dict[str, Any]) -> Result:
        try:
            read = model.model_validate(given)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ToolError(f"wrong arguments of {name}: {problems}") from error
        arguments = {field: getattr(read, field) for field in fields}
        if inspect.iscoroutinefunction(function):
            return as_result(await function(**arguments))
        return as_result(await in_thread(lambda: function(**arguments)))

    return Tool(name, inspect.cleandoc(function.__doc__ or ""), schema, call)
