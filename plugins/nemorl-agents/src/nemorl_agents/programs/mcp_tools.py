"""The tools of MCP servers, for the time of an episode."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TextIO

import mcp
from nemorl.errors import UsageError
from nemorl_media.decoding import media_of_base64

from nemorl_agents.programs.config import MCPServerConfig
from nemorl_agents.programs.program import clean_environment
from nemorl_agents.programs.results import Result, as_json, text_of
from nemorl_agents.programs.tools import Tool, ToolError


@asynccontextmanager
async def mcp_tools(servers: Sequence[MCPServerConfig], timeout_s: float) -> AsyncIterator[list[Tool]]:
    """Connect to the servers; commands are started here and ended on leaving.

    Args:
        servers: By command or by address.
        timeout_s: For a server to say what it offers.

    Raises:
        UsageError: One cannot be reached.
    """
    failed: Exception | None = None
    with open(os.devnull, "w") as nowhere:
        async with AsyncExitStack() as stack:
            tools: list[Tool] = []
            for server in servers:
                client = await _connected(stack, server, nowhere, timeout_s)
                tools += await _tools_of(client)
            try:
                yield tools
            except Exception as error:  # raised in here it would reach the episode inside groups of the client's tasks
                failed = error
    if failed is not None:
        raise failed


async def _connected(stack: AsyncExitStack, server: MCPServerConfig, errors: TextIO, timeout_s: float) -> mcp.Client:
    target: Any = server.url
    if server.command:
        program, *arguments = server.command
        environment = {**clean_environment(), **server.env}
        target = mcp.stdio_client(mcp.StdioServerParameters(command=program, args=arguments, env=environment), errors)
    try:
        return await stack.enter_async_context(mcp.Client(target, read_timeout_seconds=timeout_s))
    except Exception as error:
        name = server.url or " ".join(server.command)
        raise UsageError(
            f"the MCP server {name!r} cannot be used: {_reason(error)}",
            fix="start it by hand to see what it says, and correct environment.tools.mcp",
        ) from error


async def _tools_of(client: mcp.Client) -> list[Tool]:
    found, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += [_tool(client, told) for told in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return found


def _tool(client: mcp.Client, told: Any) -> Tool:
    async def call(given: dict[str, Any]) -> Result:
        result = await client.call_tool(told.name, given)
        parts = [_part(part) for part in result.content]
        if result.is_error:
            raise ToolError(text_of(parts))
        if any(part["type"] != "text" for part in parts):
            return parts
        return text_of(parts) or as_json(result.structured_content)

    return Tool(told.name, told.description or "", told.input_schema, call)


def _part(part: Any) -> dict[str, Any]:
    if part.type in ("image", "audio"):
        item = media_of_base64(part.data, part.mime_type)
        return {"type": item.kind, item.kind: item}
    return {"type": "text", "text": part.text if part.type == "text" else f"[{part.type}]"}


def _reason(error: BaseException) -> str:
    """The first cause inside groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
