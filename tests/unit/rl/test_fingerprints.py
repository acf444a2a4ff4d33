"""A fingerprint differs where the contents do, is equal where they are, and costs a few reads."""

from __future__ import annotations

import datetime
import json
import operator
import subprocess
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import datasets
import nemorl
import numpy as np
import pytest
from nemorl_rl.data import fingerprints
from nemorl_rl.data.code_fingerprints import code_fingerprints
from nemorl_rl.data.fingerprints import rows_fingerprint
from nemorl_rl.data.mixtures import Joined, Mixture, RowSets
from nemorl_rl.data.rows import rows_of
from nemorl_rl.models.model_files import weights_fingerprint
from nemorl_tasks.datasets.config import FileConfig
from nemorl_tasks.environments.judge.config import JudgeConfig
from pydantic import BaseModel
from safetensors.numpy import save_file

Rows = list[dict[str, Any]]


def table(count: int) -> Rows:
    return [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(count)]


def as_file(rows: Rows, folder: Path, name: str = "rows.jsonl", **options: Any) -> Sequence[Any]:
    path = folder / name
    if name.endswith(".jsonl"):
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    found = FileConfig(path=path, **options).build("train")
    assert found is not None
    return found


KINDS: dict[str, Callable[[Rows, Path], Sequence[Any]]] = {
    "list": lambda rows, _: rows,
    "tuple": lambda rows, _: tuple(rows),
    "datasets.Dataset": lambda rows, _: datasets.Dataset.from_list(rows),
    "file": as_file,
    "parquet": partial(as_file, name="rows.parquet"),
    "file with a template": partial(as_file, prompt_template="Q: {prompt}"),
    "mixture": lambda rows, _: Mixture([rows[: len(rows) // 2], rows[len(rows) // 2 :]], [2, 1]),
    "repeated": lambda rows, _: Joined([rows] * 1000),
    "sets": lambda rows, _: RowSets({"a": rows, "b": rows}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_of_a_row_is_seen(kind: str, tmp_path: Path) -> None:
    """Any value of any row, their order, one more, one less."""
    make, rows, random = KINDS[kind], table(60), Random(0)
    before = rows_fingerprint(make(rows, tmp_path))
    assert rows_fingerprint(make([dict(row) for row in rows], tmp_path)) == before
    for _ in range(10):
        number, column = random.randrange(len(rows)), random.choice(["prompt", "answer"])
        changed = [{**row, column: "other"} if n == number else row for n, row in enumerate(rows)]
        assert rows_fingerprint(make(changed, tmp_path)) != before
    for changed in (rows[:-1], [*rows, rows[0]], [rows[1], rows[0], *rows[2:]]):
        assert rows_fingerprint(make(changed, tmp_path)) != before


@pytest.mark.parametrize("kind", ["file", "parquet"])
def test_one_row_of_a_large_file_is_seen(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table(fingerprints.WHOLE + 100)
    before = rows_fingerprint(KINDS[kind](rows, tmp_path))
    left_out = next(iter({*range(len(rows))} - {*Random(0).sample(range(len(rows)), fingerprints.WHOLE)}))
    rows[left_out]["answer"] = "x"
    assert rows_fingerprint(KINDS[kind](rows, tmp_path)) != before


def test_the_part_that_max_rows_keeps_is_what_counts(tmp_path: Path) -> None:
    """A file that has grown since gives the same rows."""
    before = rows_fingerprint(as_file(table(20), tmp_path, max_rows=10))
    assert rows_fingerprint(as_file(table(30), tmp_path, max_rows=10)) == before


class Computed(Sequence[dict[str, Any]]):
    """Rows of which nobody knows what they cost, some of which cannot be made."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        if index % 3 == 0:
            raise LookupError(index)
        return {"prompt": f"{index}^2="}


def test_few_rows_are_read_of_those_that_are_computed() -> None:
    endless = Computed(2**31 - 1)
    assert rows_fingerprint(endless) == rows_fingerprint(Computed(2**31 - 1))
    assert endless.asked == fingerprints.COMPUTED


def test_of_a_large_file_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "BLOCK_BYTES", 10)
    monkeypatch.setattr(fingerprints, "WHOLE_FILE_BLOCKS", 5)
    file = tmp_path / "file"
    found = set()
    for content in (b"a" * 49 + b"b", b"a" * 50, b"a" * 50 + b"b" * 50, b"a" * 50 + b"b" * 51, b"b" * 100):
        file.write_bytes(content)
        found.add(fingerprints.file_digest(file))
    assert len(found) == 5


def test_values_that_json_lacks_are_told_apart_and_addresses_are_not() -> None:
    class Picture:
        pass

    def row(value: Any) -> str:
        return rows_fingerprint([{"x": value}])

    assert row(Picture()) == row(Picture())
    assert row({1: Picture()}) == row({1: Picture()})
    values: list[Any] = [b"a", b"b", Decimal(1), Decimal(2), datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)]
    values += [float("nan"), None, "\ud800", {"a", "b"}, {"a", "c"}, np.int64(3), np.int64(4), np.float32(0.5)]
    assert len({row(value) for value in values}) == len(values)


def test_a_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    code = "from nemorl_rl.data.fingerprints import rows_fingerprint as f; print(f([{'a': {'x', 'y', 'z'}, 'b': 1}]))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


# Code

SOURCE = """
from functools import partial
LIMIT = 7
def helper(text): return len(text) % LIMIT
class Scale:
    def __call__(self, value): return self.by(value)
    def by(self, value): return 2.0 * value
scale = Scale()
def score(prompt, response):
    def inner(): return helper(response)
    return Scale()(inner())
def unrelated(): return 1
def closed(factor):
    def score(prompt, response): return factor * helper(response)
    return score
half, limited = closed(0.5), partial(score, "")
"""


def module(folder: Path, source: str) -> ModuleType:
    file = folder / f"rewards_{abs(hash(source))}.py"
    file.write_text(source)
    made = ModuleType("rewards")
    made.__file__ = str(file)
    exec(compile(source, str(file), "exec"), vars(made))
    return made


@pytest.mark.parametrize("name", ["score", "half", "limited"])
@pytest.mark.parametrize(
    ("old", "new", "is_seen"),
    [
        ("LIMIT = 7", "LIMIT = 8", True),
        ("len(text) %", "3 + len(text) %", True),
        ("return 1", "return 2", False),
        ("2.0 * value", "3.0 * value", "Scale"),
        ("closed(0.5)", "closed(0.6)", "half"),
    ],
)
def test_what_a_reward_reaches_in_its_module_counts(
    name: str, old: str, new: str, is_seen: bool | str, tmp_path: Path
) -> None:
    before, after = (code_fingerprints(getattr(module(tmp_path, s), name)) for s in (SOURCE, SOURCE.replace(old, new)))
    expected = is_seen if isinstance(is_seen, bool) else (name != "half" if is_seen == "Scale" else name == is_seen)
    assert [*before] == [*after]
    assert (before != after) == expected


def test_what_is_compiled_has_no_source() -> None:
    assert code_fingerprints(["math", print, operator.itemgetter(0)]) == {}


def test_rewards_are_found_wherever_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def reward(prompt, response): return 1.0\n")
    rewards = module(tmp_path, SOURCE)

    class Own(nemorl.Environment):
        def score(self, prompt: Any, response: str) -> float:
            return 1.0

    def names(source: Any) -> list[str]:
        return [name.rpartition(".")[2] for name in code_fingerprints(source)]

    assert names(rewards.score) == ["score"]
    assert names([rewards.score, "math", (rewards.half, 0.1)]) == ["score", "score"]
    assert names({"a": "math", "b": (Own(), 2.0)}) == ["Own"]
    assert names(nemorl.WeightedEnvironment({"a": rewards.score})) == ["score"]
    assert names(nemorl.RewardFunction(rewards.score)) == ["score"]
    assert [*code_fingerprints("own.py:reward")] == ["own.py"]
    assert code_fingerprints({"name": "agent", "command": ["python", "own.py"]}).keys() == {"own.py"}
    judge = JudgeConfig(url="https://node7/v1", model="m", cache="own.py")
    assert code_fingerprints(judge) == {}, "what a run writes itself is no code"
    assert code_fingerprints("x" * 5000 + ".py") == code_fingerprints("a\0.py") == {}


def test_splits_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, table(10))))
    source = {"name": "file", "path": str(file), "validation_fraction": 0.5}
    train, held_out = (rows_of(source, split) for split in ("train", "validation"))
    assert train is not None
    assert held_out is not None
    assert rows_fingerprint(train) != rows_fingerprint(held_out)


def test_weights_are_known_by_their_contents_and_not_by_their_place(tmp_path: Path) -> None:
    values = {"norm": np.ones(4, np.float32), "head": np.zeros((2, 4), np.float32)}
    folders = {name: tmp_path / name for name in ("one", "copy", "other", "renamed")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        changed = {**values, "head": values["head"] + 1e-3} if name == "other" else values
        changed = {"nom": values["norm"], "head": values["head"]} if name == "renamed" else changed
        save_file(changed, folder / "model.safetensors")
    found = {name: weights_fingerprint(str(folder)) for name, folder in folders.items()}
    assert found["one"] == found["copy"]
    assert len(set(found.values())) == 3
    (folders["one"] / "model.safetensors").unlink()
    assert weights_fingerprint(str(folders["one"])) is None
    assert weights_fingerprint("no/such-model") is None


def test_a_program_without_a_suffix_is_code_as_well(tmp_path: Path) -> None:
    class Program(BaseModel):
        command: tuple[str, ...]

    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\necho 1\n")
    config = Program(command=(str(program), "{prompt}"))
    before = code_fingerprints(config)
    assert list(before) == [str(program)]
    program.write_text("#!/bin/sh\necho 2\n")
    assert code_fingerprints(config) != before
