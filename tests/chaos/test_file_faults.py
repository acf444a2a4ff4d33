"""Every file operation of a run may fail: some of them here, all by ``file_sweep.py`` (docs/results/chaos.md)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from command_sweep import CommandSweep
from faulty_files import Fault, build, faults_at, operations
from file_sweep import FileSweep
from warm import Warm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"),
]

CASES = [
    ("new", Fault("write .environment.json.#.draft", 1, "killed in a write")),
    ("new", Fault("write checkpoints/.writing_step_#/policy/.tmp*", 2, "short write")),
    ("new", Fault("rename checkpoints/.writing_step_#", 3, "killed before")),
    ("new", Fault("list checkpoints", 12, "io error")),
    ("new", Fault("write events.jsonl", 5, "full from here")),
    ("gone back", Fault("close checkpoints/step_#/trainer.json", 1, "io error")),
]
"""One of each way to fail, and what was mended in most places."""
OTHERS = [
    ("new", Fault("sync checkpoints/.writing_step_#/manifest.json", 2, "io error")),
    ("new", Fault("close checkpoints/.removed_step_#", 1, "io error")),
    ("new", Fault("write metrics.jsonl", 4, "killed in a write")),
    ("new", Fault("read events.jsonl", 2, "io error")),
    ("new", Fault("read config.yaml", 1, "io error")),
    ("continued", Fault("open-write .metrics.jsonl.#.draft", 1, "no space once")),
    ("continued", Fault("list checkpoints/step_#/policy/model", 1, "io error")),
    ("gone back", Fault("rename checkpoints/step_#", 1, "killed before")),
    ("after a kill", Fault("open-write run.lock", 4, "io error")),
    ("after a kill", Fault("unlink records/train/step_#.parquet", 1, "io error")),
]
"""The other mended defects."""

OF_COMMANDS = [
    ("copy", Fault("list run/checkpoints", 2, "io error")),
    ("copy", Fault("open-write place/checkpoints/step_#/policy/optimizer.json", 1, "no space once")),
    ("prune", Fault("rename run/checkpoints/step_#", 1, "killed before")),
]


@pytest.fixture(scope="module")
def sweep(place: Path, forks: Warm) -> FileSweep:
    return FileSweep(place / "files", forks)


@pytest.mark.parametrize(
    ("story", "fault"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)], ids=str
)
def test_one_failing_file_operation_costs_no_step(sweep: FileSweep, story: str, fault: Fault) -> None:
    assert sweep.problems(story, fault) == []


@pytest.mark.full
def test_a_command_that_meets_a_failing_disk_says_so_and_works_afterwards(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMORL_AUDIT", str(place / "audit"))
    with closing(CommandSweep(place / "commands")) as commands:
        for name, fault in OF_COMMANDS:
            assert commands.problems(name, fault) == [], (name, str(fault))


def test_every_operation_of_a_run_can_be_made_to_fail_in_each_way_it_can(sweep: FileSweep) -> None:
    places = sweep.places("new")
    kinds = Counter(key.partition(" ")[0] for key, _ in places)
    assert set(kinds) >= {"open-write", "open-read", "read", "write", "sync", "close", "rename", "mkdir", "unlink"}
    faults = Counter((fault.key.partition(" ")[0], fault.mode) for fault in faults_at(places))
    assert faults["write", "killed in a write"] == faults["write", "short write"] == kinds["write"]
    assert faults["sync", "io error"] == faults["sync", "no space once"] == kinds["sync"]
    assert faults["read", "killed before"] == 0  # the disk holds then what it holds at the next change


CALLS = {
    "write": "write",
    "pwrite64": "write",
    "sendfile": "write",
    "fsync": "sync",
    "ftruncate": "truncate",
    "rename": "rename",
}
RAW = re.compile(r"\.tmp[^/]*$")
"""Drafts of the safetensors library, which are renamed by system calls that no library can stand between."""


@pytest.mark.full
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_nothing_that_strace_sees_escapes(sweep: FileSweep, tmp_path: Path) -> None:
    library, log, run = build(tmp_path), tmp_path / "log", tmp_path / "run"
    arguments = [str(sweep.model), str(run), str(tmp_path / "trace"), str(tmp_path / "outcome")]
    script = f"import tiny_runs; raise SystemExit(tiny_runs.train(*{arguments!r}))"
    watched = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={','.join(CALLS)}", f"-ELD_PRELOAD={library}"]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([*watched, sys.executable, "-c", script], check=True, env=here)
    seen: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        path = re.search(rf'[<"]{re.escape(str(run))}/([^>"]+)', line)
        if path and not RAW.search(path[1]):
            seen[CALLS[line.split()[1].partition("(")[0]]] += 1
    traced = Counter(key.partition(" ")[0] for key, _ in operations(tmp_path / "trace") if not key.endswith(".tmp*"))
    assert {kind: traced[kind] for kind in set(CALLS.values())} == {kind: seen[kind] for kind in set(CALLS.values())}
