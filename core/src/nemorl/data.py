"""Tables of rows, rows to batches, and rows to prompts. Datasets themselves are plugins."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, cast, runtime_checkable

from nemorl.errors import DataError, UsageError, boundary
from nemorl.seeding import derive_seed
from nemorl.tokenizer import Tokenizer
from nemorl.types import Message, Prompt, Row


@runtime_checkable
class Table(Protocol):
    """Rows by number: a list of mappings, a ``datasets.Dataset``, or any other random access to rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "test"),
}
"""The names that a split goes by, in order of preference."""


def as_rows(source: Any) -> Sequence[Row]:
    """``source`` itself, if it is a table of rows.

    Raises:
        UsageError: it is something else; says what to pass.
    """
    fix = 'pass a list of {"prompt": …} mappings, a datasets.Dataset, or the name or path of a dataset'
    if not isinstance(source, Table) or isinstance(source, str | bytes | Mapping):
        raise UsageError(f"a {type(source).__name__} is not a table of rows", fix=fix)
    if len(source) == 0:
        return []
    try:
        first = source[0]
    except (KeyError, TypeError, IndexError) as error:  # a data frame, say, is indexed by column
        raise UsageError(f"a {type(source).__name__} cannot be read by row number", fix=fix) from error
    if not isinstance(first, Mapping):
        raise UsageError(f"the first row is {first!r:.60}, not a mapping of columns", fix=fix)
    return cast("Sequence[Row]", source)  # only numbers are asked of it, and its length


def split_of(splits: Mapping[Any, Any], split: str) -> Sequence[Row] | None:
    """One split of ``{"train": rows, "validation": rows}`` (a ``datasets.DatasetDict`` is one), if it is there."""
    if "train" not in splits:
        raise UsageError(
            f"a mapping with {', '.join(map(str, splits)) or 'nothing'} is no dataset",
            fix='pass {"train": rows, "validation": rows}, {"name": dataset, …options}, or the rows of one split',
        )
    found = next((splits[name] for name in SPLITS[split] if name in splits), None)
    return None if found is None else as_rows(found)


class RowDataModule:
    """Shuffled batches of rows, endlessly, with a position that can be saved.

    The order of an epoch depends on seed and epoch number only, so a position is one integer. Batches run across the
    end of an epoch: every row is seen exactly once per epoch, and all batches have the same size.
    """

    def __init__(
        self, rows: Sequence[Row], batch_size: int, *, seed: int, shuffle: bool = True, owner: str = "the dataset"
    ) -> None:
        """
        Args:
            rows: All there are.
            batch_size: Rows per batch.
            seed: Seeds the order.
            shuffle: Each epoch in another order; else in that of ``rows``.
            owner: What errors in reading a row call the dataset.
        """
        self._owner = owner
        if len(rows) == 0:
            raise DataError("the dataset has no rows", fix="check its path, split and filters")
        self._rows, self._batch_size, self._seed, self._shuffle = rows, batch_size, seed, shuffle
        self._position = 0
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    @property
    def first_row(self) -> Row:
        """Of the data as it was given."""
        with boundary(self._owner):
            return self._rows[0]

    def next_batch(self) -> list[Row]:
        count = len(self._rows)
        batch = []
        with boundary(self._owner):
            for position in range(self._position, self._position + self._batch_size):
                epoch, offset = divmod(position, count)
                batch.append(self._rows[self._order(epoch)[offset]])
        self._position += self._batch_size
        return batch

    @property
    def epoch(self) -> int:
        return self._position // len(self._rows)

    def steps(self, epochs: int) -> int:
        """Batches in ``epochs`` passes, at least one."""
        return max(1, len(self._rows) * epochs // self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "rows": len(self._rows), "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for key in ("rows", "seed"):
            if state[key] != mine[key]:
                raise DataError(
                    f"the checkpoint was made with {key} = {state[key]}, the dataset now has {mine[key]}",
                    fix="resume with the same dataset and seed, or start a new run",
                )
        self._position = int(state["position"])

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order


def to_prompt(row: Row, index: int, tokenizer: Tokenizer) -> Prompt:
    """A dataset row as a task. ``prompt`` is raw text or chat messages; ``messages`` may stand for the latter.

    Raises:
        DataError: the row has neither, or an empty one.
    """
    source = row.get("prompt") or row.get("messages")
    answer = row.get("answer")
    messages: tuple[Message, ...]
    if isinstance(source, str) and source:
        text, messages, ids = source, (), tokenizer.encode(source)
    elif isinstance(source, Sequence) and source:
        messages = _prompt_turns(source)
        text = next((turn["content"] for turn in reversed(messages) if turn["role"] == "user"), messages[-1]["content"])
        ids = tokenizer.encode_prompt(messages)
    else:
        raise DataError(
            f"row {index} has no prompt (columns: {', '.join(map(str, row))})",
            fix="give rows a `prompt` (text or messages), or map your column to it in `data:`",
        )
    return Prompt(index, text, tuple(ids), messages, None if answer is None else str(answer), row)


def to_prompts(rows: Sequence[Row], tokenizer: Tokenizer) -> list[Prompt]:
    return [to_prompt(row, index, tokenizer) for index, row in enumerate(rows)]


def _prompt_turns(turns: Sequence[Any]) -> tuple[Message, ...]:
    """Chat turns up to where the assistant is to speak: a final assistant turn is the answer, not the prompt."""
    for turn in turns:
        if not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn):
            raise DataError(f"{turn!r} is not a chat message", fix='write {"role": "user", "content": "…"}')
    kept = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    if not kept:
        raise DataError("a conversation holds only the assistant's answer", fix="begin it with a user message")
    return tuple({"role": str(turn["role"]), "content": str(turn["content"])} for turn in kept)
