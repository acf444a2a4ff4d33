"""Records as the episodes that they were made of: what :mod:`nemorl_cli.report.records.table` wrote, read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from nemorl.media import Media
from nemorl.types import Branch, Prompt, Sample, Score
from nemorl_rl.agents.seats import SeatScores
from nemorl_rl.serving.requests import PlacedSample, TurnPlace

from nemorl_cli.report.records.columns import routes_of
from nemorl_cli.report.records.items import true_ids


def sample_of(row: Mapping[str, Any], media: Mapping[str, Media]) -> Sample:
    """An episode as it was learnt from. Of its prompt the text, the answer and the tokens are recorded, not the row.

    Args:
        row: Its record.
        media: Images and sounds that it shows, by digest (``media_files.read_media``).
    """
    first, *others = row["sequences"]
    shown = row["media"] or ()
    items = tuple(media[item["digest"]] for item in shown)
    ids = true_ids(first["token_ids"], shown)
    of_prompt = items[: row["prompt_media"] or 0]
    prompt = Prompt(row["group"], row["prompt"], ids[: row["prompt_tokens"]], (), row["answer"], media=of_prompt)
    named = {
        column: {pair["name"]: pair["value"] for pair in row[column] or ()} for column in ("components", "metrics")
    }
    score = Score(row["reward"], named["components"], named["metrics"], row["correct"], row["given"], row["valid"])
    score = replace(score, outcome=row.get("outcome") or "scored", cause=row.get("cause") or "")
    if row.get("seats"):
        seats = {pair["name"]: Score(pair["value"]) for pair in row["seats"]}
        score = SeatScores(**{each.name: getattr(score, each.name) for each in fields(Score)}, seats=seats)
    earned: dict[int, list[tuple[int, float]]] = {}
    for turn in row["turns"] or ():
        if turn["reward"] is not None:
            earned.setdefault(turn["sequence"], []).append((turn["stop"] - 1, turn["reward"]))
    branches = tuple(
        Branch(
            true_ids(one["token_ids"], shown),
            tuple(one["mask"]),
            tuple(one["generation_logprobs"]),
            tuple(earned.get(number, ())),
            _version_runs(one),
            routes_of(one.get("routes")),
        )
        for number, one in enumerate(others, start=1)
    )
    return PlacedSample(
        prompt,
        ids,
        tuple(first["mask"]),
        tuple(first["generation_logprobs"]),
        score,
        row["response"],
        row["finish_reason"],
        row["num_turns"],
        tuple(row["weight_versions"]),
        tuple(earned.get(0, ())),
        branches,
        items,
        version_runs=_version_runs(first),
        routes=routes_of(first.get("routes")),
        turn_places=tuple(_turn_places(row)),
        seats=names if any(names := tuple(str(one.get("seat") or "") for one in row["sequences"])) else (),
    )


def _turn_places(row: Mapping[str, Any]) -> Iterator[TurnPlace]:
    """Answers in the order in which they were made. Two that follow each other without a word between are one."""
    turns = [turn for turn in row["turns"] or () if turn["author"] == "policy"]
    for turn in sorted(turns, key=lambda turn: turn["began_s"] or 0.0):
        yield TurnPlace(turn["sequence"], turn["start"], turn["stop"])


def _version_runs(sequence: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Files of older versions have none."""
    return tuple((run["start"], run["version"]) for run in sequence.get("version_runs") or ())
