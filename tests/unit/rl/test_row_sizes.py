"""A row that is far too long is refused by its number and size, before anybody tokenises or unpacks it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from nemorl.config import load_config
from nemorl.errors import DataError
from nemorl_rl.data.row_sizes import CHARACTERS_PER_TOKEN, require_size
from nemorl_rl.data.rows import open_data
from nemorl_tasks.datasets import files
from recorded_messages import Raises

LIMIT = 32
MOST = LIMIT * CHARACTERS_PER_TOKEN
LONG = "x" * (MOST + 1)


def config() -> Any:
    settings = {"algorithm": "grpo", "model": "org/m", "environment": "math", "policy": {"max_sequence_tokens": LIMIT}}
    return load_config({**settings, "generation": {"max_new_tokens": 8}})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": LONG},
        {"prompt": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": [{"role": "user", "content": "x"}] * (MOST // 2)},
        {"prompt": "x", "response": LONG},
        {"prompt": "x", "completion": [{"role": "assistant", "content": LONG}]},
        {"prompt": "x", "chosen": "y", "rejected": LONG},
        {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
    ],
)
def test_a_text_that_no_sequence_holds_is_refused_wherever_it_stands(row: dict[str, Any], raises: Raises) -> None:
    with raises(DataError, 7, "2,048"):
        require_size(row, "row 7", LIMIT)
    require_size(
        {"prompt": LONG[1:], "answer": LONG, "tests": [LONG]}, "row 7", LIMIT
    )  # as much as fits; not for tokens


def test_the_row_is_named_in_training_and_validation(raises: Raises) -> None:
    rows = [{"prompt": "a"}, {"prompt": LONG}]
    data, held_out = open_data({"train": rows, "validation": rows}, None, config(), batch_size=2)
    with raises(DataError, 1, "prompt", "2,049"):
        data.next_batch()
    assert held_out is not None
    with raises(DataError, "validation", 1, "prompt"):
        held_out.measure(lambda rows: {"accuracy": 1.0}, max_rows=2)


def test_a_packed_line_is_bounded_before_it_is_parsed(tmp_path: Path, raises: Raises) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": "x" * (files.MAX_ROW_BYTES + 1)}).encode()))
    with raises(DataError, 1, "16,777,216"):
        files.read(path)


def test_a_file_that_unpacks_to_hundreds_of_times_its_size_is_refused(
    raises: Raises, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "HARMLESS_BYTES", 1 << 20)
    packed, table = tmp_path / "rows.jsonl.gz", tmp_path / "rows.parquet"
    packed.write_bytes(gzip.compress((json.dumps({"prompt": "x" * 1000}) + "\n").encode() * 4000))
    cells = pyarrow.table({"prompt": [f"{n}" + "x" * (1 << 20) for n in range(4)]})
    pyarrow.parquet.write_table(cells, table, compression="zstd")
    for path in (packed, table):
        with raises(DataError, 200, varies=r"has [\d,]+ bytes"):
            files.read(path)
    sound = tmp_path / "sound.jsonl.gz"
    sound.write_bytes(
        gzip.compress("\n".join(json.dumps({"prompt": f"{n * n % 977} {n}"}) for n in range(50_000)).encode())
    )
    assert len(files.read(sound)) == 50_000
