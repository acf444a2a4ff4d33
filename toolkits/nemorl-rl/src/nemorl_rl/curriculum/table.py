"""The statistics of a run's prompts as a table with their texts, for its records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nemorl.types import Row

from nemorl_rl.chat.rows import text_of
from nemorl_rl.curriculum.statistics import PromptStatistics

SHOWN_CHARACTERS = 200
"""Of a prompt: the beginning."""


def prompt_table(
    statistics: PromptStatistics, rows_at: Callable[[Sequence[int]], Sequence[Row]]
) -> dict[str, list[Any]]:
    """Columns of equal length, one entry per prompt that was asked: the fields of ``PromptRecord`` and

    - ``row``: its number in the data, ``prompt``: the beginning of its text;
    - ``pass_rate``: of its recent attempts.

    Args:
        statistics: Of the run.
        rows_at: Rows of the data by number.
    """
    columns = statistics.columns()
    texts = [prompt_text(row)[:SHOWN_CHARACTERS] for row in rows_at(columns["row"])]
    return {**columns, "prompt": texts, "pass_rate": [record.pass_rate for _, record in statistics]}


def prompt_text(row: Row) -> str:
    """The prompt of a row, or the last message of a user in it; empty where there is neither.

    Example:
        >>> prompt_text({"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]})
        '1+1?'
    """
    source = row.get("prompt") or row.get("messages") or ""
    if isinstance(source, str):
        return source
    return next((text_of(turn) for turn in reversed(source) if turn.get("role") == "user"), "")
