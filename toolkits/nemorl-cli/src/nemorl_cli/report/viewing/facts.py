"""Facts of records that a viewer sorts and filters by: those of their columns, and two that need every token.

# R = records of a table, S = their token sequences, T = tokens of all sequences
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from nemorl_cli.report.records.picking import is_right, prompt_items
from nemorl_cli.report.records.reading import NAMED
from nemorl_cli.report.records.tokens import Array

if TYPE_CHECKING:
    import pyarrow as pa

TURN_TIMES = tuple(f"turns.list.element.{name}" for name in ("author", "began_s", "ended_s"))
COLUMNS = (
    *("began_s", "ended_s", "split", "step", "dataset", "seed", "group_id", "sample_id", "group"),
    *("prompt", "response", "answer", "given"),
    *("reward", "components", "metrics", "correct", "valid", "advantage", "kl", "filtered", "finish_reason"),
    *("outcome", "cause", "media", "prompt_media"),
    *("prompt_tokens", "tokens", "total_tokens", "num_turns", "weight_versions", "sequences"),
    *TURN_TIMES,
)
"""Of the records that facts are made of."""
DIGITS = 4
"""After the point, of seconds."""
BEGINNING = 240
"""Characters of prompt and response in lists."""
MOST_ITEMS = 4
"""Images and sounds of a prompt in lists."""
Fact = dict[str, Any]


def facts_of(table: pa.Table) -> list[Fact]:
    """One dictionary per record: its light columns, and

    - ``right``: the environment says so, else its reward is above a half; ``group_right`` and ``group_size``: how many
      of its group are, and how many there are;
    - ``mismatch``: largest |trainer's log-prob before the update - sampler's| of the tokens that the policy chose;
    - ``gradient``: sum over tokens of |weight in the loss x advantage|;
    - ``seconds``: from the beginning of the episode until it was scored; ``spans``: of each turn with times whether it
      is the policy's, and its two moments.

    They are ``None`` where what they need was not recorded. Prompt and response are cut to their beginnings.

    Args:
        table: ``COLUMNS`` of records.
    """
    light: list[Fact] = table.drop_columns(["sequences", "turns"]).to_pylist()
    mismatch, gradient = token_facts(table)
    spans = turn_spans(table)
    groups: dict[str, list[Fact]] = defaultdict(list)
    for row, most, weight, turns in zip(light, mismatch, gradient, spans, strict=True):
        for name in NAMED:
            row[name] = {pair["name"]: _finite(pair["value"]) for pair in row[name] or ()}
        began_s, ended_s = row["began_s"], row["ended_s"]
        seconds = None if began_s is None or ended_s is None else ended_s - began_s
        row |= {"mismatch": most, "gradient": weight, "right": is_right(row), "seconds": seconds, "spans": turns}
        for name in ("reward", "advantage", "kl"):
            row[name] = _finite(row[name])
        groups[row["group_id"]].append(row)
    for members in groups.values():
        right = sum(row["right"] for row in members)
        for row in members:
            row |= {"group_right": right, "group_size": len(members)}
    return light


def shortened(fact: Mapping[str, Any]) -> Fact:
    """For a list: prompt and response by their beginnings, and of images and sounds the prompt's first ones."""
    cut = {name: (fact[name] or "")[:BEGINNING] for name in ("prompt", "response")}
    return {**fact, **cut, "media": [*prompt_items(fact)[:MOST_ITEMS]]}


def summary_of(facts: Sequence[Mapping[str, Any]]) -> Fact:
    """Records of one step in a few numbers; ``None`` where no record has one."""
    first = {fact["group_id"]: fact for fact in facts}.values()
    known = [fact["mismatch"] for fact in facts if fact["mismatch"] is not None]
    return {
        "records": len(facts),
        "groups": len(first),
        "reward": _mean([fact["reward"] for fact in facts]),
        "right": _mean([float(fact["right"]) for fact in facts]),
        "truncated": sum(fact["finish_reason"] == "length" for fact in facts),
        "all_wrong": sum(not fact["group_right"] for fact in first),
        "all_right": sum(fact["group_right"] == fact["group_size"] for fact in first),
        "tokens": _mean([fact["tokens"] for fact in facts]),
        "mismatch": max(known, default=None),
    }


def turn_spans(table: pa.Table) -> list[list[tuple[int, float, float]] | None]:
    """Of each record's turns with times: 1 where it is the policy's, and when it began and ended, in seconds."""
    turns = table["turns"].combine_chunks()
    names = [field.name for field in turns.type.value_type]
    if "began_s" not in names:  # an older version wrote it
        return [None] * len(table)
    values = turns.flatten()
    if values.field("began_s").null_count == len(values):
        return [None] * len(table)
    authors, began, ended = (values.field(name).to_pylist() for name in ("author", "began_s", "ended_s"))
    stops = turns.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).cumsum().tolist()
    return [
        [
            (int(authors[turn] == "policy"), round(began[turn], DIGITS), round(ended[turn], DIGITS))
            for turn in range(start, stop)
            if began[turn] is not None and ended[turn] is not None
        ]
        or None
        for start, stop in pairwise([0, *stops])
    ]


def token_facts(table: pa.Table) -> tuple[list[float | None], list[float | None]]:
    """(mismatch, gradient) of each record; see :func:`facts_of`."""
    sequences = table["sequences"].combine_chunks()
    counts = sequences.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)  # [R]
    parts = sequences.flatten()
    lengths = parts.field("token_ids").value_lengths().fill_null(0).to_numpy(zero_copy_only=False)  # [S]
    record_of_token = np.repeat(np.repeat(np.arange(len(table)), counts), lengths)  # [T]
    chosen = _tokens(parts, "mask", lengths) == 1
    difference = np.abs(_tokens(parts, "old_logprobs", lengths) - _tokens(parts, "generation_logprobs", lengths))
    advantages = _tokens(parts, "advantages", lengths)
    whole = table["advantage"].to_numpy().astype(np.float64)  # of the episode, where its tokens have the same
    advantages = np.where(np.isnan(advantages), whole[record_of_token], advantages)
    weight = np.abs(_tokens(parts, "loss_weights", lengths) * advantages)
    most = _by_record(np.fmax, np.where(chosen, difference, np.nan), record_of_token, len(table))
    total = _by_record(np.add, weight, record_of_token, len(table))
    return most, total


def _tokens(parts: pa.StructArray, name: str, lengths: Array) -> Array:
    """[T] float64 of a field; NaN in the sequences that lack it."""
    field = parts.field(name)
    if len(parts) and parts.null_count:
        raise ValueError("a token sequence is null")
    found = np.full(int(lengths.sum()), np.nan)
    has = np.repeat(field.is_valid().to_numpy(zero_copy_only=False), lengths)
    values = field.flatten().to_numpy(zero_copy_only=False)
    if len(values) != int(has.sum()):
        raise ValueError(f"{name} and token_ids have different lengths")
    found[has] = values
    return found


def _by_record(reduce: np.ufunc, values: Array, record_of_token: Array, count: int) -> list[float | None]:
    found: list[float | None] = [None] * count
    if not len(values):
        return found
    starts = np.flatnonzero(np.diff(record_of_token, prepend=-1))
    for record, value in zip(record_of_token[starts], reduce.reduceat(values, starts).tolist(), strict=True):
        found[record] = _finite(value)
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
