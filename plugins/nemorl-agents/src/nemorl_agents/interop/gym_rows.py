"""Rows of NeMo-Gym: JSON Lines with ``responses_create_params``, ``agent_ref`` and what its verifier wants."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.errors import DataError
from nemorl.types import Row
from nemorl_rl.chat.media import PARTS

from nemorl_agents.interop.episodes_config import GYM_COLUMN, GYM_PARAMS

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
NO_PROMPT = "(the agent writes the prompt)"


def rows(path: Path, *, agent: str | None = None) -> Sequence[Row]:
    """The rows of a file. A task is kept whole for the server that plays it; ``prompt`` is what it begins with.

    Args:
        path: JSON Lines.
        agent: Only rows of this agent.

    Raises:
        DataError: A line is no task of Gym.
    """
    found = [_row(path, number, line) for number, line in _lines(path)]
    if agent is not None:
        found = [row for row in found if _agent(row[GYM_COLUMN]) == agent]
    if not found:
        of = f" of agent {agent!r}" if agent is not None else ""
        raise DataError(f"{path} has no task{of}", fix="correct the path" if agent is None else "correct data.agent")
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _row(path: Path, number: int, line: bytes) -> Row:
    try:
        task = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is no JSON: {error}", fix="give JSON Lines, one task per line") from error
    params = task.get(GYM_PARAMS) if isinstance(task, Mapping) else None
    if not isinstance(params, Mapping) or not isinstance(params.get("input"), str | list):
        raise DataError(
            f"{path}:{number} has no {GYM_PARAMS} with an input", fix="give a file as Gym's `ng_prepare_data` writes it"
        )
    return {"prompt": prompt_of(params), GYM_COLUMN: task}


def prompt_of(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat that a request of the responses API begins with; its tools are the agent's to tell.

    >>> prompt_of({"instructions": "Be brief.", "input": "2+2?"})
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2+2?'}]
    """
    given = params["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    turns = [{"role": "system", "content": params["instructions"]}] if params.get("instructions") else []
    turns += [
        {"role": ROLES[item["role"]], "content": _content(item.get("content"))}
        for item in items
        if isinstance(item, Mapping) and item.get("role") in ROLES
    ]
    return turns or [{"role": "user", "content": NO_PROMPT}]


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Text, or parts where there are images or sounds among them."""
    if isinstance(content, str):
        return content
    parts = [part for part in content or () if isinstance(part, Mapping)]
    if not any(part.get("type") in PARTS for part in parts):
        return "\n".join(str(part.get("text", "")) for part in parts)
    return [
        dict(part) if part.get("type") in PARTS else {"type": "text", "text": str(part.get("text", ""))}
        for part in parts
    ]


def _agent(task: Mapping[str, Any]) -> str | None:
    given = task.get("agent_ref")
    return given.get("name") if isinstance(given, Mapping) else None
