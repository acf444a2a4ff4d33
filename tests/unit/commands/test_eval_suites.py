"""``nemorl eval --suite`` on a tiny model, local rows standing in for the hub."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import yaml
from command_line import Command


@pytest.fixture
def evaluate(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nemorl: Command) -> Command:
    """Run ``nemorl eval`` on the tiny model, in this process, without the hub."""
    config = {"model": str(tiny_model), "algorithm": "grpo", "policy": {"init": "random"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return partial(nemorl, "eval")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    problems = [{"problem": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in problems))
    return path


SMALL = ["--generations", 2, "suite.max_new_tokens=3", "suite.data.chat=false"]


@pytest.mark.slow
def test_several_suites_are_one_table_and_one_that_fails_is_left_out(
    evaluate: Command, rows: Path, tmp_path: Path
) -> None:
    places = ["--rows", f"aime24={rows}", "--rows", f"math500={rows}"]
    output = tmp_path / "samples.jsonl"
    names = ["--suite", "aime24,math500", "--suite", "gpqa"]
    done = evaluate(tmp_path / "run.yaml", *names, *places, *SMALL, "--output", output)
    assert done.code == 1, done.err
    lines = {tuple(line.split()[:2]): line.split() for line in done.out.splitlines() if line.strip()}
    assert set(lines) >= {("SUITE", "METRIC"), ("aime24", "pass@1"), ("aime24", "cons@2"), ("math500", "pass@1")}
    assert lines["aime24", "pass@1"][3] == "±"
    assert lines["gpqa", "–"][2:4] == ["not", "run"]
    assert "gpqa was not run: cannot load split" in done.err
    assert "aime24 differs from its protocol: num_generations 2 (published: 64)" in done.out
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["dataset"] for record in records] == ["aime24"] * 6 + ["math500"] * 6
    (first, *_) = (record for record in records if record["index"] == 0)  # lines are in the order of scoring
    assert first["prompt"].startswith("0+1?\nPlease reason step by step")


@pytest.mark.slow
def test_json_has_the_protocol_of_each_suite_and_what_was_changed(
    evaluate: Command, rows: Path, tmp_path: Path
) -> None:
    done = evaluate(
        tmp_path / "run.yaml", "--suite", "aime24", "--rows", f"aime24={rows}", *SMALL, "--max-samples", 2, "--json"
    )
    assert (done.code, done.err) == (0, "")
    suite = json.loads(done.out)["suites"]["aime24"]
    assert set(suite) >= {"pass@1", "cons@2", "standard_errors", "questions", "protocol", "changed"}
    assert suite["questions"] == 2
    assert suite["changed"]["max_samples"] == {"published": None, "here": 2}
    assert suite["changed"]["max_new_tokens"] == {"published": 32768, "here": 3}
    assert any("arXiv:2501.12948" in text for text in suite["protocol"]["source"])


@pytest.mark.slow
def test_a_suite_of_ones_own_is_a_file(evaluate: Command, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "mine",
                "summary": "sums",
                "source": ["ourselves, for this test"],
                "data": {"name": "file", "path": str(rows), "prompt_column": "problem"},
                "environment": "math",
                "max_new_tokens": 2,
            }
        )
    )
    done = evaluate(tmp_path / "run.yaml", "--suite", tmp_path / "mine.yaml", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["suites"][str(tmp_path / "mine.yaml")]["questions"] == 3


@pytest.mark.slow
def test_the_list_of_suites_names_their_sources(evaluate: Command) -> None:
    done = evaluate("--suites", "--json")
    listed = {suite["name"]: suite for suite in json.loads(done.out)}
    assert {"aime24", "aime25", "aime26", "math500", "gpqa", "mmlu", "mmlu_pro", "gsm8k"} <= set(listed)
    assert all(suite["source"] for suite in listed.values())
    assert "arXiv:2501.12948" in evaluate("--suites").out.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "amie24"], "Did you mean 'aime24'?"),
        (["--suite", "aime24,aime24"], "suite aime24 is asked for twice"),
        (["--suite", "aime24", "--data", "arithmetic"], "a suite says itself what is asked"),
        (["--suite", "aime24", "--rows", "aime25=rows.jsonl"], "--rows aime25=rows.jsonl is not SUITE=PATH"),
        (["--rows", "aime24=rows.jsonl"], "--rows says where the rows of a suite are"),
        (["--suite", "aime24", "suite.temperatur=1"], "temperatur"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_told_before_a_model_is_loaded(
    evaluate: Command, tmp_path: Path, arguments: list[str], says: str
) -> None:
    done = evaluate(tmp_path / "run.yaml", *arguments)
    assert done.code == 2
    assert says in done.err


def test_a_suite_whose_rows_cannot_be_had_says_how_to_give_them(evaluate: Command, tmp_path: Path) -> None:
    done = evaluate(tmp_path / "run.yaml", "--suite", "gpqa")
    assert done.code == 1
    assert "gpqa was not run: cannot load split" in done.err
    assert "--rows gpqa=rows.jsonl" in done.err
    missing = evaluate(tmp_path / "run.yaml", "--suite", "gpqa", "--rows", f"gpqa={tmp_path / 'none.jsonl'}")
    assert "hub" not in missing.err
