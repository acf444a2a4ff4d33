"""JSON lines: strict, flushed, and whole again after a kill."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nemorl.base.files.jsonl import JsonlWriter, read_jsonl
from nemorl.errors import StorageError
from recorded_messages import Raises


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def steps(path: Path) -> list[object]:
    return [record.get("step") for record in read_jsonl(path)]


def test_records_come_back_in_order_and_are_readable_while_the_writer_is_open(path: Path) -> None:
    writer = JsonlWriter(path)
    writer.write({"step": 1, "train/reward": 0.5})
    writer.write({"step": 2})
    assert list(read_jsonl(path)) == [{"step": 1, "train/reward": 0.5}, {"step": 2}]
    writer.close()
    writer.close()


def test_non_finite_numbers_become_null(path: Path) -> None:
    with JsonlWriter(path) as writer:
        writer.write({"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}})
    assert "NaN" not in path.read_text()
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1.0], "c": {"d": None}}


def test_numpy_scalars_become_numbers_and_paths_text(path: Path) -> None:
    with JsonlWriter(path) as writer:
        writer.write({"a": np.float32(0.5), "b": np.int64(3), "c": Path("x/y"), "d": np.float32("nan")})
    assert list(read_jsonl(path)) == [{"a": 0.5, "b": 3, "c": "x/y", "d": None}]


def test_any_model_output_survives_the_round_trip(path: Path) -> None:
    text = "line\nbreak \u2028 é 漢 \udc80 </script>"
    with JsonlWriter(path) as writer:
        writer.write({"response": text})
    assert path.read_bytes().count(b"\n") == 1
    assert next(read_jsonl(path))["response"] == text


def test_a_missing_file_reads_as_empty(path: Path) -> None:
    assert list(read_jsonl(path)) == []


@pytest.mark.parametrize("cut", ['{"step": 3, "tra', "nul", '{"text": "caf\u00e9'])
def test_a_cut_last_line_is_skipped_by_readers_and_removed_by_the_next_writer(path: Path, cut: str) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + cut.encode()[:-1])
    assert steps(path) == [1, 2]
    with JsonlWriter(path) as writer:
        writer.write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_long_cut_line_is_removed_whole(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"text": "' + "x" * 200_000)
    JsonlWriter(path).close()
    assert path.read_text() == '{"step": 1}\n'


def test_a_whole_last_line_without_newline_is_kept(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"step": 1}')
    with JsonlWriter(path) as writer:
        writer.write({"step": 2})
    assert steps(path) == [1, 2]


def test_truncate_after_drops_later_steps_and_keeps_records_without_one(path: Path) -> None:
    with JsonlWriter(path) as writer:
        for record in ({"step": 1}, {"event": "warning"}, {"step": 2}, {"step": 3}):
            writer.write(record)
        writer.truncate_after(2)
        writer.write({"step": 3, "again": True})
    assert list(read_jsonl(path)) == [{"step": 1}, {"event": "warning"}, {"step": 2}, {"step": 3, "again": True}]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_disk_that_cannot_be_read_is_named(path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}\n")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for call in ("open", "is_file"):
        with monkeypatch.context() as patch, raises(StorageError, path):
            patch.setattr(Path, call, fails)
            list(read_jsonl(path))


def test_a_record_of_which_the_disk_took_a_part_costs_no_other(
    path: Path, small_files_only: Any, raises: Raises
) -> None:
    with JsonlWriter(path) as writer:
        writer.write({"step": 1})
        with small_files_only(1000), raises(StorageError, path):
            writer.write({"step": 2, "text": "x" * 2000})
        writer.write({"step": 3})
    assert steps(path) == [1, 3]


def test_a_number_that_python_has_not_is_text(path: Path) -> None:
    with JsonlWriter(path) as writer:
        writer.write({"a": np.longdouble("0.5"), "b": np.clongdouble(2j)})
    assert list(read_jsonl(path)) == [{"a": "0.5", "b": "2j"}]
