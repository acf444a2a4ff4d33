"""Reading local tables, with errors that name the line.

JSON Lines is indexed and decoded on access, so a big file costs eight bytes a row and rows may differ in shape.
Parquet is memory-mapped by the ``datasets`` library. JSON and CSV are read whole; their values stay as written.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from nemorl.base.text.reading import UnreadableError, kind_of, parse_json, read_text
from nemorl.errors import DataError

from nemorl_tasks.datasets.hub import quiet

COMPRESSED = ".jsonl.gz"
"""JSON Lines that are read whole: where a line starts is not known without decompressing all before it."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUPPORTED = (".jsonl", COMPRESSED, ".ndjson", ".json", ".parquet", ".csv", ".tsv")
"""Ends of the names of tables, in upper or lower case."""

MAX_ROW_BYTES = 16 << 20
"""A row is one task: with more, a line break is missing somewhere."""
MAX_JSON_BYTES = 1 << 30
"""A .json file is read whole."""
MAX_RATIO, HARMLESS_BYTES = 200, 64 << 20
"""A packed file may unpack to so many times its size, and in any case to so much."""
TOO_LONG = "write JSON Lines (.jsonl), one row per line, long values cut"

Table = Sequence[Mapping[str, Any]]


def is_table(path: Path | str) -> bool:
    """The name is that of a file which can be read here."""
    return str(path).lower().endswith(SUPPORTED)


def read(path: Path) -> Table:
    """The whole table; every row has been parsed once, so that line 900,000 fails now and not mid-run."""
    path = _checked(path)
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return _non_empty([row for _, row in _json_lines(path)], path)
    if suffix == ".parquet":
        return _read_parquet(path)
    if suffix in DELIMITERS:
        return _non_empty(list(_csv_rows(path)), path)
    if suffix == ".json":
        return _read_json(path)
    return _non_empty(JsonLines(path), path)


def first_row(path: Path) -> Mapping[str, Any]:
    """The first row, without reading the rest where the format allows it."""
    path = _checked(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _first_parquet_row(path)
    if suffix == ".json":
        return _read_json(path)[0]
    rows = _csv_rows(path) if suffix in DELIMITERS else (row for _, row in _json_lines(path))
    row = next(iter(rows), None)
    if row is None:
        raise _empty(path)
    return row


class JsonLines(Sequence[Mapping[str, Any]]):
    """One JSON object per line. Keeps where each line starts, not what it says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("q", (start for start, _ in _json_lines(path)))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            return parse_json(file.readline())


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset, row) of every line that is not blank; of a packed file the offset is that in its text."""
    start, size = 0, path.stat().st_size
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), 1):
            offset, start = start, start + len(line)
            _require_ratio(path, size, start)
            if len(line) > MAX_ROW_BYTES:
                raise DataError(f"{path}, line {number}: longer than {MAX_ROW_BYTES:,} bytes", fix=TOO_LONG)
            if number == 1 and line.startswith(b"\xef\xbb\xbf"):  # the byte order mark of Windows editors
                offset, line = 3, line[3:]  # noqa: PLW2901
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except UnreadableError as error:
                where = str(error).removeprefix("line 1, ")
                start_of_line = line.strip()[:80].decode(errors="replace")
                raise DataError(
                    f"{path}, line {number}: not valid JSON ({where}): {start_of_line}",
                    fix="write one complete JSON object per line, in UTF-8",
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, line {number}: a {type(row).__name__} where a row, {{…}}, belongs",
                    fix="write one JSON object per line, or name the file .json if it is one list",
                )
            yield offset, row


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, unpacked where it is packed; what the disk or the packing refuses is an error of the data."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield cast(IO[bytes], file)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not readable JSON Lines ({error})", fix="download or write it again") from error


def _require_ratio(path: Path, packed: int, unpacked: int) -> None:
    """Refuse a file that unpacks to what no data do: texts compress to a tenth, tables of numbers to a fiftieth."""
    if unpacked > HARMLESS_BYTES and unpacked > MAX_RATIO * packed:
        raise DataError(
            f"{path} has {packed:,} bytes and unpacks to more than {MAX_RATIO} times as many ({unpacked:,})",
            fix="check where it comes from; if it is right, unpack it first",
        )


def _read_json(path: Path) -> Table:
    """A list of objects, ``{"data": [...]}``, or JSON Lines under another name."""
    try:
        data = parse_json(read_text(path, MAX_JSON_BYTES))
    except UnreadableError as error:
        if "Extra data" in str(error):  # one object, and then another
            return _non_empty(JsonLines(path), path)
        raise DataError(f"{path}: not valid JSON: {error}", fix="correct it, or write JSON Lines (.jsonl)") from error
    if isinstance(data, dict):
        lists = [value for value in data.values() if isinstance(value, list)]
        data = lists[0] if len(data) == 1 and lists else [data]
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise DataError(f"{path} does not hold a list of rows", fix='write [{"prompt": …}, …]')
    return _non_empty(data, path)


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows as text, blanks included: a library that guesses types would turn the answer 007 into 7."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=DELIMITERS[path.suffix.lower()])
        try:
            header = next(reader, None)
            for values in reader:
                if not values:
                    continue
                if len(values) != len(header or ()):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(values)} values for {len(header or ())} columns",
                        fix="put quotes around values that contain the delimiter or line breaks",
                    )
                yield dict(zip(header or (), values, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            fix = TOO_LONG if "field limit" in str(error) else "save it as UTF-8 CSV"
            raise DataError(f"{path}, line {reader.line_num}: {error}", fix=fix) from error


def _read_parquet(path: Path) -> Table:
    import datasets

    _first_parquet_row(path)
    with quiet():
        table: Table = datasets.load_dataset("parquet", data_files=str(path), split="train")
    return table


def _first_parquet_row(path: Path) -> Mapping[str, Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
            _require_ratio(path, path.stat().st_size, sum(group.total_byte_size for group in groups))
            batch = next(file.iter_batches(batch_size=1), None)
            rows: list[Mapping[str, Any]] = batch.to_pylist() if batch is not None else []
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file ({error})", fix="write it again") from error
    if not rows:
        raise _empty(path)
    return rows[0]


def _checked(path: Path) -> Path:
    """``path`` made absolute, after the mistakes that need no look inside."""
    given, path = path, path.expanduser().absolute()
    if not is_table(path):
        what = f"has the extension {path.suffix!r}" if path.suffix else "has no extension"
        raise DataError(f"{given} {what}, which is no supported format", fix=f"use one of {', '.join(SUPPORTED)}")
    if path.is_dir():
        raise DataError(f"{given} is a folder", fix="name the file in it, or use data: {name: huggingface, path: …}")
    if not path.exists():
        raise DataError(f"{given} does not exist", fix=_closest(path))
    if (what := kind_of(path)) != "file":  # opening a pipe would wait for somebody to write into it
        raise DataError(f"{given} is a {what}, not a file", fix="write the rows to a file first")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{given} cannot be read ({error.strerror})", fix="check its permissions") from error
    if path.stat().st_size == 0:
        raise _empty(given)
    return path


def _closest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either; check the path"
    names = [item.name for item in path.parent.iterdir() if is_table(item)]
    close = difflib.get_close_matches(path.name, names, n=1)
    if close:
        return f"did you mean {close[0]!r} in the same folder?"
    held = f"holds {', '.join(sorted(names)[:5])}" if names else "holds no data file"
    return f"the folder {path.parent} {held}; paths are relative to the working directory"


def _non_empty(table: Table, path: Path) -> Table:
    if not len(table):
        raise _empty(path)
    return table


def _empty(path: Path) -> DataError:
    return DataError(f"{path} has no rows", fix="check the program that wrote it, or choose another file")
