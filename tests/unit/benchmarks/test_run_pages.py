"""Every page of docs/results says how its figures are made again, and the program that does so reads it right."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# By its file: names of other benchmarks are those of modules of tests.
_SPEC = importlib.util.spec_from_file_location("run_pages", ROOT / "benchmarks/run_pages.py")
assert _SPEC is not None
assert _SPEC.loader is not None
run_pages = sys.modules["run_pages"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(run_pages)

PAGES = run_pages.pages()


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_has_commands_of_programs_that_are_there(page: Path) -> None:
    own = run_pages.commands(page)
    assert own
    named = [word for command in own for word in command.line.split() if word.startswith(("benchmarks/", "tests/"))]
    assert not [word for word in named if not (ROOT / word.partition("::")[0]).exists()]


def test_commands_are_read_from_blocks_and_inline_code(tmp_path: Path) -> None:
    page = tmp_path / "some.md"
    page.write_text(
        "# Some\n\n`python benchmarks/view.py\n--json a` and `nemorl view`\n\n```bash\n"
        "A=1 python benchmarks/turns.py \\\n    --repeats 3   # two minutes\nmake\n```\n\n    pytest tests/unit -q\n"
    )
    assert [(command.line, command.remark) for command in run_pages.commands(page)] == [
        ("A=1 python benchmarks/turns.py --repeats 3", "two minutes"),
        ("pytest tests/unit -q", ""),
        ("python benchmarks/view.py --json a", ""),
    ]


def test_what_needs_something_of_the_readers_is_not_run() -> None:
    assert run_pages.Command("p", 1, "python docs/count_migration.py Aug=given/not-there").lacks == "given/not-there"
    assert run_pages.Command("p", 1, "python benchmarks/gpu/check.py").lacks == "a GPU"
    assert not run_pages.Command("p", 1, "python benchmarks/curriculum.py --warm-up-to model").lacks


def test_the_table_does_not_depend_on_what_the_reader_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = run_pages.Command("p", 1, "python benchmarks/x.py given/there")
    (tmp_path / "given/there").mkdir(parents=True)
    monkeypatch.setattr(run_pages, "ROOT", tmp_path)
    assert not command.lacks
    assert command.asks == "given/there"


def test_a_command_runs_beside_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_pages, "OUTPUTS", tmp_path)
    found = run_pages.run(
        run_pages.Command("some", 2, "WORD=there python -c \"import os; print(os.environ['WORD'])\""), 60
    )
    assert found["result"] == "ok"
    assert (tmp_path / "some/2.txt").read_text().splitlines()[1] == "there"
    assert run_pages.run(run_pages.Command("some", 3, "python -c 'raise SystemExit(3)'"), 60)["result"] == "exit 3"


def test_what_a_command_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_pages, "OUTPUTS", tmp_path)
    (tmp_path / "start.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)\n"
    )
    assert run_pages.run(run_pages.Command("some", 4, "python ../start.py"), 60)["result"] == "ok"
    stat = Path(f"/proc/{(tmp_path / 'some/4.txt').read_text().splitlines()[1]}/stat")
    for _ in range(600):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"{stat} is still there")


def test_the_table_counts_what_was_run_again_and_names_what_is_left() -> None:
    page = next(page for page in PAGES if page.stem == "gpu")
    (command,) = run_pages.commands(page)
    assert "0 of 1 |  | 1 (needs a GPU) |" in run_pages.table({})
    done = {"result": "exit 3", "seconds": 90, "date": "2026-11-28", "load": 7}
    lines = run_pages.table({command.key: done})
    assert " 1 were run again (2026-11-28, load 7, 1.5 minutes); 1 of these did not end well.**" in lines
    assert "| 1 of 1 | 2026-11-28, load 7, 1.5 minutes | 1 (exit 3) |" in lines


def test_the_table_is_that_of_the_pages_and_of_what_was_run_again() -> None:
    found = json.loads(run_pages.RERUNS.read_text())
    assert (run_pages.RESULTS / "index.md").read_text() == run_pages.table(found)
    assert not set(found) - {command.key for page in PAGES for command in run_pages.commands(page)}
