"""Recorded samples as text for the terminal: a line of facts, then who said what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nemorl_cli.report.records.media_labels import with_labels
from nemorl_cli.report.records.picking import prompt_items
from nemorl_cli.terminal import styled

SHOWN_LINES = 6
"""Of a response, unless all is wanted."""
SHOWN_CHARACTERS = 600
STYLES = {"prompt": "cyan", "policy": "", "environment": "yellow", "response": "", "answer": "green"}
MISSING = "–"

Record = Mapping[str, Any]


def transcript(record: Record, labels: Sequence[str] = (), *, full: bool = False) -> Group:
    """A sample: its facts, and its prompt and response, or with ``full`` every turn of it.

    Args:
        record: Of the sample.
        labels: Of its images and sounds.
        full: With every turn, in full length.
    """
    head = Text(" · ").join(styled(*fact) for fact in facts(record))
    body = Table.grid(padding=(0, 2))
    body.add_column(no_wrap=True, style="dim")
    body.add_column(overflow="fold")
    for name, text in _parts(record, labels, full=full):
        body.add_row(name, styled(text if full else clipped(text), STYLES.get(name, "")))
    return Group(head, Padding(body, (0, 0, 1, 2), expand=False))


def facts(record: Record) -> Iterator[tuple[str, str]]:
    """(text, style) of what there is to say of a sample in a line."""
    yield str(record["sample_id"]), "bold"
    yield f"reward {_number(record.get('reward'))}", "bold"
    components = record.get("components") or {}
    if len(components) > 1:
        yield ", ".join(f"{name} {_number(value)}" for name, value in components.items()), ""
    if record.get("correct") is not None:
        yield ("right", "green") if record["correct"] else ("wrong", "red")
    if record.get("advantage") is not None:
        yield f"advantage {record['advantage']:+.3f}", ""
    yield f"{record.get('tokens')} tokens", ""
    if (record.get("num_turns") or 1) > 1:
        yield f"{record['num_turns']} turns", ""
    if record.get("began_s") is not None and record.get("ended_s") is not None:
        yield f"{record['ended_s'] - record['began_s']:.1f} s", ""
    if record.get("finish_reason") == "length":
        yield "cut off", "yellow"
    if record.get("outcome") not in (None, "scored", "truncated"):
        cause = f": {record['cause']}" if record.get("cause") else ""
        yield str(record["outcome"]).replace("_", " ") + cause, "red"
    if record.get("filtered") is not None:
        yield f"not trained on: {str(record['filtered']).replace('_', ' ')}", "yellow"


def clipped(text: str) -> str:
    """The beginning and the end of a long text, where the answer is; what is between is counted."""
    lines = text.split("\n")
    if len(lines) > SHOWN_LINES:
        left_out = len(lines) - SHOWN_LINES
        kept = [*lines[: SHOWN_LINES // 2], f"… {left_out} more lines …", *lines[-(SHOWN_LINES - SHOWN_LINES // 2) :]]
        text = "\n".join(kept)
    if len(text) > SHOWN_CHARACTERS:
        half, left_out = SHOWN_CHARACTERS // 2, len(text) - SHOWN_CHARACTERS
        text = f"{text[:half]} … {left_out} more characters … {text[-half:]}"
    return text


def token_table(record: Record, texts: Mapping[int, str], labels: Sequence[str] = ()) -> Iterator[tuple[str, ...]]:
    """(place, token, author, sampler's log-prob, trainer's before the update, their ratio, weight in the loss) of
    each token. Tokens of one item are one line.

    Args:
        record: With its ``turns`` and ``sequences``.
        texts: Token id -> text.
        labels: Of its images and sounds.
    """
    lengths = [item["tokens"] for item in record.get("media") or ()]
    for number, sequence in enumerate(record["sequences"] or ()):
        authors = {
            place: turn["author"]
            for turn in record["turns"]
            if turn["sequence"] == number
            for place in range(turn["start"], turn["stop"])
        }
        for place, count, token in folded(sequence["token_ids"], lengths):
            where = str(place) if count == 1 else f"{place}-{place + count - 1}"
            yield (
                f"{number}:{where}" if len(record["sequences"]) > 1 else where,
                labels[-1 - token] if token < 0 else repr(texts[token])[1:-1] if token in texts else str(token),
                authors.get(place, ""),
                *_logprobs(sequence, place),
                _at(sequence["loss_weights"], place, "{:.2e}"),
            )


def folded(ids: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place, how many, id) of tokens as records have them, those of one item that stand together in one.

    Args:
        ids: Of a sequence.
        lengths: Tokens of each item.

    Example:
        >>> list(folded([5, -1, -1, -1, -1, 6], [2]))
        [(0, 1, 5), (1, 2, -1), (3, 2, -1), (5, 1, 6)]
    """
    place = 0
    while place < len(ids):
        end = place + 1
        while ids[place] < 0 and end < min(len(ids), place + lengths[-1 - ids[place]]) and ids[end] == ids[place]:
            end += 1
        yield place, end - place, ids[place]
        place = end


def _logprobs(sequence: Mapping[str, Any], place: int) -> tuple[str, str, str]:
    if not sequence["mask"][place]:
        return MISSING, MISSING, MISSING
    sampled, old = sequence["generation_logprobs"][place], sequence["old_logprobs"]
    ratio = [old[place] - sampled] if old is not None and old[place] is not None else None
    return f"{sampled:.3f}", _at(old, place, "{:.3f}"), _at(ratio, 0, "{:+.4f}")


def _at(values: Sequence[float] | None, place: int, form: str) -> str:
    return MISSING if values is None or values[place] is None else form.format(values[place])


def _parts(record: Record, labels: Sequence[str], *, full: bool) -> Iterator[tuple[str, str]]:
    if full and record.get("turns"):
        several = len({turn["sequence"] for turn in record["turns"]}) > 1
        for turn in record["turns"]:
            lead = f"[sequence {turn['sequence']}] " if several and turn["author"] == "prompt" else ""
            earned = f"  (earned {_number(turn['reward'])})" if turn.get("reward") is not None else ""
            yield turn["author"], f"{lead}{with_labels(turn['text'], turn.get('shown'), labels)}{earned}"
    else:
        shown = labels[: len(prompt_items(record))]
        yield "prompt", " ".join([*shown, str(record.get("prompt") or "")])
        yield "response", str(record.get("response") or "")
    if record.get("answer") is not None:
        given = f"   given: {record['given']}" if record.get("given") is not None else ""
        yield "answer", f"{record['answer']}{given}"


def _number(value: Any) -> str:
    return MISSING if value is None else f"{value:.3g}"
