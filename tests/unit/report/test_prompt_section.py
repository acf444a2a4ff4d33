"""The report's section on prompts: which are listed, and which curves are drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nemorl
import pytest
from nemorl_cli.console import Console
from nemorl_cli.report.records.prompts import read_prompts, write_prompts
from nemorl_cli.report.records.reading import FOLDER
from nemorl_cli.report.report import write_report
from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import Curves, Table, Text
from nemorl_cli.report.viewing.prompts import prompt_section
from nemorl_rl.curriculum.statistics import Outcome, PromptStatistics
from nemorl_rl.curriculum.table import prompt_table

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]


def test_the_section_lists_the_hardest_the_easiest_and_the_most_visited(tmp_path: Path) -> None:
    statistics = PromptStatistics(20)
    for row in range(7):
        statistics.add(row, Outcome(attempts=6, passes=row, rewards=2.0 * row, tokens=60), step=1)
    statistics.add(3, Outcome(attempts=6, passes=3, rewards=6.0, tokens=120), step=1)
    columns = prompt_table(statistics, lambda numbers: [ROWS[number] for number in numbers])
    write_prompts(tmp_path / FOLDER, columns, step=9, rows=8)
    run = replace(RunData.load(tmp_path), metrics={"train/prompts/pass_rate/hard": {1: 0.0, 2: 0.5}})

    section = prompt_section(run, tmp_path)
    assert section is not None
    text, table, curves = section.blocks
    assert isinstance(text, Text)
    assert isinstance(table, Table)
    assert isinstance(curves, Curves)
    # Row 0 passed 0 of 6, row 6 all 6; 7 rows of 8 in 8 groups.
    for fact in ("7 of 8 prompts", "step 9", "8 groups", "1 of them always", "1 never"):
        assert fact in text.text
    listed = {name: [row[1] for row in table.rows if row[0] == name] for name in ("hardest", "easiest", "most visited")}
    assert listed["hardest"] == ["0+1=", "1+1=", "2+1=", "3+1=", "4+1="]
    assert listed["easiest"] == ["6+1=", "5+1=", "4+1=", "3+1=", "2+1="]
    assert listed["most visited"][:2] == ["3+1=", "0+1="]
    # 3 of 6 in both groups; rewards 6 and 6, tokens 60 and 120, of 12 attempts.
    assert [*table.rows[10]] == ["most visited", "3+1=", 0.5, 0.5, 1.0, 12, 2, 15.0, 1]
    assert dict(curves.series) == {"hard": {1: 0.0, 2: 0.5}}


def test_a_damaged_file_of_prompts_is_as_none(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "prompts.parquet").write_bytes(b"PAR1 but not quite")
    assert read_prompts(tmp_path) is None
    assert prompt_section(RunData.load(tmp_path), tmp_path) is None


@pytest.mark.slow
def test_a_run_records_its_prompts_and_its_report_shows_them(tiny_model: Path, tmp_path: Path) -> None:
    config = {
        "algorithm": "grpo",
        "model": str(tiny_model),
        "run_dir": str(tmp_path / "run"),
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "max_steps": 3,
        "generation": {"max_new_tokens": 4},
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "prompt_sampling": "pass_rate",
    }

    def reward(prompt: str, response: str) -> float:
        return float(len(response) % 2)

    nemorl.load_config(config).build().fit(ROWS, reward, console=Console(quiet=True))
    records = read_prompts(tmp_path / "run")
    assert records is not None
    assert (records.step, records.rows) == (3, 8)
    assert sum(records.table["attempts"].to_pylist()) == 3 * 2 * 4
    assert f"{len(records.table)} of 8 prompts were asked" in write_report(tmp_path / "run").read_text()
