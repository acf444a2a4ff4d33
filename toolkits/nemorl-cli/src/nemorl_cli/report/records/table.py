"""Samples as a table of records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from nemorl.media import Media, media_by_name
from nemorl.types import Sample, Score
from nemorl_rl.agents.seats import SeatScores
from nemorl_rl.rollouts.outcomes import outcome_of
from nemorl_rl.serving.requests import PlacedSample, TimedTurns

from nemorl_cli.report.records.columns import doubles, field_lists, named_numbers, routes_column, strings, token_lists
from nemorl_cli.report.records.items import Shown
from nemorl_cli.report.records.schema import ROUTES, RUNS, SCHEMA, SEQUENCE
from nemorl_cli.report.records.tokens import FIELDS, Tokens, Trained
from nemorl_cli.report.records.turns import Decode, turns_column


@dataclass(frozen=True)
class Group:
    """A group to be recorded."""

    number: int
    """Its place in the step's batch."""
    samples: Sequence[Sample]
    rejected: str | None = None
    """Why it is not trained on."""
    id_suffix: str = ""


Verdict = Callable[[Sequence[int]], bool | None]
"""Whether weights are proven, by their versions; ``None``: nobody knows."""


def no_verdict(_versions: Sequence[int]) -> bool | None:
    """Of a run whose engines are not asked."""
    return None


@dataclass(frozen=True)
class Rollout:
    """Records of a step, in one file."""

    run: str
    split: str
    step: int
    time: float
    """Epoch seconds at which the responses were scored."""
    groups: Sequence[Group]
    """Those that train first."""
    part: int = 1
    """Of the rollouts of this split and step: validation sets are several."""
    dataset: str | None = None
    """Of an evaluation."""
    seed: int | None = None
    """Of an evaluation: the number of its repetition."""
    trained: Sequence[Trained] = ()
    """Of the token sequences of the groups that are not rejected, in order; empty where nothing is trained on them."""
    began_s: float | None = None
    """When the step began: a moment of ``time.monotonic()``. Unset: no times are known."""
    verdict: Verdict = no_verdict
    """On the weights of an episode."""


def table_of(rollout: Rollout, decode: Decode) -> pa.Table:
    """One row per episode.

    Raises:
        ValueError: Tokens of images and sounds are not those of the episodes' items.
    """
    samples = [sample for group in rollout.groups for sample in group.samples]
    tokens = Tokens.of([sample.sequences for sample in samples], rollout.trained)
    shown = Shown.of(tokens, [(*sample.prompt.media, *sample.media) for sample in samples])
    prompts = [decode(group.samples[0].prompt.token_ids) for group in rollout.groups]
    prompt_texts = [text for group, text in zip(rollout.groups, prompts, strict=True) for _ in group.samples]
    columns = {
        **_of_rollout(rollout, len(samples)),
        **_of_groups(rollout),
        **_of_samples(samples),
        **_of_tokens(rollout, samples, tokens),
        **_of_times(samples, rollout.began_s),
        "turns": turns_column(samples, tokens, shown, decode, prompt_texts, rollout.began_s),
        "media": shown.column,
        "sequences": _sequences(
            tokens,
            shown,
            [part for sample in samples for part in sample.sequences],
            [seat for sample in samples for seat in _seats(sample)],
        ),
    }
    arrays = [_as(columns[field.name], field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _of_rollout(rollout: Rollout, count: int) -> dict[str, Any]:
    began_s = rollout.began_s
    values = {
        "run": rollout.run,
        "split": rollout.split,
        "dataset": rollout.dataset,
        "seed": rollout.seed,
        "step": rollout.step,
        "time": rollout.time,
        "step_time": None if began_s is None else time.time() - (time.monotonic() - began_s),
    }
    return {name: pa.repeat(pa.scalar(value, SCHEMA.field(name).type), count) for name, value in values.items()}


def _of_groups(rollout: Rollout) -> dict[str, Any]:
    part = f".{rollout.part}" if rollout.part > 1 else ""
    ids = [f"{rollout.split}-{rollout.step}{part}-{group.number}{group.id_suffix}" for group in rollout.groups]
    pairs = list(zip(rollout.groups, ids, strict=True))
    return {
        "group_id": [group_id for group, group_id in pairs for _ in group.samples],
        "sample_id": [f"{group_id}-{place}" for group, group_id in pairs for place in range(len(group.samples))],
        "group": [group.number for group in rollout.groups for _ in group.samples],
    }


def _of_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    scores = [sample.score for sample in samples]
    return {
        "prompt": strings([sample.prompt.text for sample in samples]),
        "response": strings([sample.response for sample in samples]),
        "answer": strings([_text(sample.prompt.answer) for sample in samples]),
        "given": strings([_text(score.answer) for score in scores]),
        "reward": doubles([float(score.reward) for score in scores]),
        "components": named_numbers([score.components for score in scores]),
        "seats": named_numbers([_seat_rewards(score) for score in scores]),
        "metrics": named_numbers([score.metrics for score in scores]),
        "correct": [None if score.correct is None else bool(score.correct) for score in scores],
        "valid": [bool(score.valid) for score in scores],
        "outcome": [outcome_of(sample) for sample in samples],
        "cause": strings([score.cause or None for score in scores]),
        "finish_reason": [sample.finish_reason for sample in samples],
        "prompt_media": [len(media_by_name(sample.prompt.media)) for sample in samples],
        "prompt_tokens": [len(sample.prompt.token_ids) for sample in samples],
        "num_turns": [sample.turns for sample in samples],
        "weight_versions": [sample.weight_versions for sample in samples],
    }


def _of_tokens(rollout: Rollout, samples: Sequence[Sample], tokens: Tokens) -> dict[str, Any]:
    return {
        "advantage": tokens.advantage,
        "kl": tokens.kl,
        "weights_proven": [rollout.verdict(sample.weight_versions) for sample in samples],
        "filtered": list(_filtered(rollout, samples, tokens)),
        "tokens": tokens.chosen,
        "total_tokens": np.diff(tokens.starts[tokens.episodes]),
    }


def _of_times(samples: Sequence[Sample], began_s: float | None) -> dict[str, Any]:
    spans = [
        sample.span.shifted(-began_s) if isinstance(sample, TimedTurns) and began_s is not None else (None, None)
        for sample in samples
    ]
    return {"began_s": doubles([began for began, _ in spans]), "ended_s": doubles([ended for _, ended in spans])}


def _filtered(rollout: Rollout, samples: Sequence[Sample], tokens: Tokens) -> Iterator[str | None]:
    """Why an episode of a batch trains nothing, or its whole group; ``None`` for those that train or are not to."""
    reasons = (group.rejected for group in rollout.groups for _ in group.samples)
    for reason, sample, is_trained, chosen in zip(reasons, samples, tokens.is_trained, tokens.chosen, strict=True):
        if reason is not None or not rollout.trained or not chosen or is_trained:
            yield reason
        else:
            yield "invalid" if not sample.score.valid else "overlong" if sample.truncated else "disagreement"


def _seats(sample: Sample) -> Sequence[str | None]:
    """Of each token sequence, the seat that asked for it."""
    seats = sample.seats if isinstance(sample, PlacedSample) else ()
    return [seat or None for seat in seats] or [None] * (1 + len(sample.branches))


def _seat_rewards(score: Score) -> dict[str, float]:
    if not isinstance(score, SeatScores):
        return {}
    return {seat: one.reward for seat, one in score.seats.items() if one.valid}


def _sequences(tokens: Tokens, shown: Shown, parts: Sequence[Sample], seats: Sequence[str | None]) -> pa.Array:
    known = [[{"start": start, "version": version} for start, version in part.version_runs] or None for part in parts]
    fields = {name: tokens.fields.get(name) for name in FIELDS} | {"advantages": tokens.uneven_advantages}
    columns = {
        "token_ids": token_lists(shown.token_ids, tokens.starts, pa.int32()),
        "mask": token_lists(tokens.mask, tokens.starts, pa.bool_()),
        "generation_logprobs": token_lists(tokens.generation_logprobs, tokens.starts, pa.float32()),
        **{name: field_lists(field, tokens.lengths) for name, field in fields.items()},
        "version_runs": pa.array(known, RUNS),
        "routes": pa.array([routes_column(part.routes) for part in parts], ROUTES),
        "seat": strings(seats),
    }
    structs = pa.StructArray.from_arrays([columns[field.name] for field in SEQUENCE], fields=list(SEQUENCE))
    return pa.ListArray.from_arrays(pa.array(tokens.episodes, pa.int32()), structs)


def _as(values: Any, kind: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


def _text(value: Any) -> str | None:
    """Datasets give answers that are no text."""
    return None if value is None else str(value)


def media_of(rollout: Rollout) -> Iterator[Media]:
    """The images and sounds that its records name."""
    return (
        item for group in rollout.groups for sample in group.samples for item in (*sample.prompt.media, *sample.media)
    )


def groups_of(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Neighbouring samples of one prompt."""
    group: list[Sample] = []
    for sample in samples:
        if group and (sample.prompt.index, sample.prompt.text) != (group[0].prompt.index, group[0].prompt.text):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group
