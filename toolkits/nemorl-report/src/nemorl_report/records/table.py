"""Samples as a table of records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from nemorl.types import Sample

from nemorl_report.records.schema import SCHEMA, SEQUENCE
from nemorl_report.records.tokens import Array, Tokens, advantage_of, differs, kl_of
from nemorl_report.records.turns import Decode, turns_of


@dataclass(frozen=True)
class Group:
    """A group to be recorded."""

    number: int
    """Its place in the step's batch."""
    samples: Sequence[Sample]
    trained: Sequence[Mapping[str, Array]] = ()
    """Fields of the batch for each token sequence of the samples, in order; empty where they train nothing."""
    rejected: str | None = None
    """Why it is not trained on."""
    id_suffix: str = ""


@dataclass(frozen=True)
class Rollout:
    """What is recorded of a step, in one file."""

    run: str
    split: str
    step: int
    time: float
    """Epoch seconds at which the responses were scored."""
    groups: Sequence[Group]
    part: int = 1
    """Of the rollouts of this split and step: validation sets are several."""
    dataset: str | None = None
    """Of an evaluation."""
    seed: int | None = None
    """Of an evaluation: the number of its repetition."""


def table_of(rollout: Rollout, decode: Decode) -> pa.Table:
    """One row per episode."""
    rows: list[dict[str, Any]] = []
    sequences: list[list[Tokens]] = []
    for group in rollout.groups:
        prompt_text = decode(group.samples[0].prompt.token_ids)
        trained = iter(group.trained)
        for place, sample in enumerate(group.samples):
            tokens = [Tokens.of(part, next(trained, None)) for part in sample.sequences]
            rows.append(_row(rollout, group, place, tokens, decode, prompt_text))
            sequences.append(tokens)
    columns = {name: [row[name] for row in rows] for name in SCHEMA.names if name != "sequences"}
    arrays = [
        _sequences(sequences) if field.name == "sequences" else pa.array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _row(
    rollout: Rollout, group: Group, place: int, tokens: Sequence[Tokens], decode: Decode, prompt_text: str
) -> dict[str, Any]:
    sample, score = group.samples[place], group.samples[place].score
    part = f".{rollout.part}" if rollout.part > 1 else ""
    group_id = f"{rollout.split}-{rollout.step}{part}-{group.number}{group.id_suffix}"
    return {
        "run": rollout.run,
        "split": rollout.split,
        "dataset": rollout.dataset,
        "seed": rollout.seed,
        "step": rollout.step,
        "time": rollout.time,
        "group_id": group_id,
        "sample_id": f"{group_id}-{place}",
        "group": group.number,
        "prompt": _text(sample.prompt.text),
        "response": _text(sample.response),
        "answer": _text(sample.prompt.answer),
        "given": _text(score.answer),
        "reward": float(score.reward),
        "components": _numbers(score.components),
        "metrics": _numbers(score.metrics),
        "correct": None if score.correct is None else bool(score.correct),
        "valid": bool(score.valid),
        "advantage": advantage_of(tokens),
        "kl": kl_of(tokens),
        "filtered": _filtered(group, sample, tokens),
        "finish_reason": sample.finish_reason,
        "prompt_tokens": len(sample.prompt.token_ids),
        "tokens": sample.response_tokens,
        "total_tokens": sample.total_tokens,
        "num_turns": sample.turns,
        "weight_versions": list(sample.weight_versions),
        "turns": [{**turn, "text": _text(turn["text"])} for turn in turns_of(sample, tokens, decode, prompt_text)],
    }


def _filtered(group: Group, sample: Sample, tokens: Sequence[Tokens]) -> str | None:
    """Why an episode of a batch trains nothing, or its whole group; ``None`` for those that train or are not to."""
    if group.rejected is not None:
        return group.rejected
    if not group.trained or sample.response_tokens == 0 or any(one.is_trained for one in tokens):
        return None
    return "invalid" if not sample.score.valid else "overlong" if sample.truncated else "disagreement"


def _sequences(episodes: Sequence[Sequence[Tokens]]) -> pa.Array:
    """The column ``sequences``, from flat arrays: lists of Python numbers would cost fifty times as much."""
    flat = [tokens for episode in episodes for tokens in episode]
    bounds = [0]
    for episode in episodes:
        bounds.append(bounds[-1] + len(episode))
    children = [
        pa.array([_values(field.name, tokens) for tokens in flat], field.type)
        for field in (SEQUENCE.field(i) for i in range(SEQUENCE.num_fields))
    ]
    structs = pa.StructArray.from_arrays(children, fields=list(SEQUENCE))
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), structs)


def _values(name: str, tokens: Tokens) -> Array | None:
    if name in ("token_ids", "mask", "generation_logprobs"):
        found: Array = getattr(tokens, name)
        return found
    values = tokens.trained.get(name)
    if name == "advantages" and values is not None and not differs(values, tokens.mask):
        return None  # the column `advantage` says it
    return values


def _numbers(named: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"name": str(name), "value": float(value)} for name, value in named.items()]


def _text(text: str | None) -> str | None:
    """Text that UTF-8 can hold: a model may write halves of pairs."""
    return None if text is None else str(text).encode("utf-8", errors="replace").decode("utf-8")


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
