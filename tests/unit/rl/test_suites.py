"""Evaluation suites: their files, their rows, their metrics and standard errors by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import ConfigError, DataError, InfrastructureError, UsageError
from nemorl.types import Prompt, Sample, Samples, SamplingParams, Score
from nemorl_rl.environments.sources import as_environment
from nemorl_rl.evaluation.evaluation import Evaluation, errors_over_prompts, measure
from nemorl_rl.evaluation.suites import changed_fields, find_suite, suite_names, suite_result
from recorded_messages import Raises

PUBLISHED: dict[str, dict[str, Any]] = {
    "aime24": {"id": 60, "problem": "Find n.", "solution": "n is 25.", "answer": "025", "url": "…", "year": "2024"},
    "aime25": {"question": "Find n.", "answer": "25"},
    "aime26": {"problem_idx": 1, "problem": "Find n.", "answer": 25},
    "math500": {"problem": "Find n.", "answer": "\\frac{1}{2}", "solution": "…", "subject": "Algebra", "level": 1},
    "gsm8k": {"question": "Find n.", "answer": "3 * 4 = <<3*4=12>>12\n#### 12"},
    "mmlu": {"question": "Which?", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": 2},
    "mmlu_pro": {
        "question": "Which?",
        "options": list("abcdefghij"),
        "answer": "I",
        "answer_index": 8,
        "category": "x",
    },
    "gpqa": {"Question": "Which?", "Correct Answer": "yes", "Subdomain": "x"}
    | {f"Incorrect Answer {n}": f"no{n}" for n in (1, 2, 3)},
}
"""A row of each suite's dataset in its published schema."""
RIGHT = {"aime24": "\\boxed{25}", "aime25": "\\boxed{25}", "aime26": "\\boxed{25}"} | {
    "math500": "So \\boxed{1/2}.",
    "gsm8k": "\\boxed{12}",
    "mmlu": "Answer: C",
    "mmlu_pro": "Answer: I",
}


def rows_of(name: str, folder: Path) -> Any:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(PUBLISHED[name]) + "\n")
    suite = find_suite(name)
    return suite.model_copy(update={"data": {**suite.data, "path": str(path)}}).rows()


def test_every_suite_says_where_its_protocol_is_from() -> None:
    assert set(suite_names()) == set(PUBLISHED)
    for name in suite_names():
        assert all(len(text) > 20 for text in find_suite(name).source)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_rows_of_a_suite_are_asked_and_graded(name: str, tmp_path: Path) -> None:
    row = rows_of(name, tmp_path)[0]
    text = row["prompt"][-1]["content"]
    if "question" in text:
        assert "where LETTER is one of ABCD" in text
        assert "Which?\n\nA) " in text
    else:
        assert text == "Find n.\nPlease reason step by step, and put your final answer within \\boxed{}."
    environment = as_environment(find_suite(name).environment)
    assert environment is not None
    prompt = Prompt(0, text, (1,), answer=str(row["answer"]), row=row)
    right = RIGHT.get(name, f"Answer: {row['answer']}")
    scores = [environment.score(prompt, said) for said in (right, "\\boxed{7}", "")]
    assert [getattr(score, "correct", None) for score in scores] == [True, False, False]
    environment.close()


def test_the_options_of_gpqa_are_shuffled_by_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(PUBLISHED["gpqa"]) + "\n" for _ in range(40)))
    suite = find_suite("gpqa")
    rows = suite.model_copy(update={"data": {**suite.data, "path": str(path)}}).rows()
    assert {row["answer"] for row in rows} == set("ABCD")


def test_a_suite_is_found_by_any_spelling_and_a_wrong_name_gets_a_hint(tmp_path: Path, raises: Raises) -> None:
    assert find_suite("AIME-24") == find_suite("aime24")
    with raises(UsageError, "amie24", "aime24"):
        find_suite("amie24")
    with raises(ConfigError, "mine.yaml"):
        find_suite(str(tmp_path / "mine.yaml"))


def test_what_differs_from_a_protocol_is_known() -> None:
    published = find_suite("aime24")
    suite = find_suite("aime24", ["num_generations=4", "temperature=1"])
    assert suite.metrics == ("pass@1", "cons@4")  # cons@64 of 4 responses
    assert changed_fields(suite, published) == {
        "num_generations": (64, 4),
        "temperature": (0.6, 1.0),
        "metrics": (("pass@1", "cons@64"), ("pass@1", "cons@4")),
    }
    sampling = suite.settings
    assert (sampling.num_generations, sampling.temperature, sampling.top_p, sampling.max_samples) == (
        4,
        1.0,
        0.95,
        10**9,
    )


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["temperature=0"], "temperature"),
        (["metrics=[best@3]"], "metrics"),
        (["metrics=[pass@65]"], "metrics"),
        (["num_generation=4"], "num_generation"),
    ],
)
def test_a_wrong_protocol_is_refused(overrides: list[str], path: str, raises: Raises) -> None:
    with raises(ConfigError, path=path):
        find_suite("aime24", overrides)


def test_rows_that_cannot_be_had_are_an_error(tmp_path: Path, raises: Raises) -> None:
    suite = find_suite("gsm8k")
    with raises((DataError, ConfigError), tmp_path / "none.jsonl"):
        suite.model_copy(update={"data": {**suite.data, "path": str(tmp_path / "none.jsonl")}}).rows()


def sample(prompt: int, correct: bool, answer: str | None = None) -> Sample:
    task = Prompt(prompt, "?", (1,))
    score = Score(float(correct), correct=correct, answer=answer)
    return Sample(task, (1, 2), (False, True), (0.0, -1.0), score, "", "stop")


GROUPS = [
    [sample(0, True, "1"), sample(0, False, "2")],  # mean 0.5
    [sample(1, True, "1"), sample(1, True, "1")],  # 1
    [sample(2, False, "2"), sample(2, False, None)],  # 0
]


def test_standard_errors_over_questions_by_hand() -> None:
    # Values 0.5, 1, 0: mean 0.5, sum of squares 0 + 0.25 + 0.25, variance 0.5 / 2, error sqrt(0.25) / sqrt(3).
    assert measure(GROUPS)["accuracy"] == 0.5
    errors = errors_over_prompts(GROUPS)
    assert errors["accuracy"] == pytest.approx(0.5 / math.sqrt(3))
    # pass@2: 1, 1, 0: mean 2/3, sum of squares 1/9 + 1/9 + 4/9 = 2/3, variance 1/3, error 1/3.
    assert errors["pass@2"] == pytest.approx(1 / 3)
    assert errors["avg_length"] == 0.0
    assert errors_over_prompts(GROUPS[:1]) == {}


def test_a_suite_reports_its_metrics() -> None:
    suite = find_suite("aime24", ["num_generations=2"])
    evaluation = Evaluation(measure(GROUPS), Samples([one for group in GROUPS for one in group]))
    result = suite_result(suite, evaluation)
    # cons@2: a tie of right and wrong counts half, then 1, then 0 (only a wrong vote).
    assert result.values == {"pass@1": 0.5, "cons@2": 0.5}
    assert result.errors == {"pass@1": pytest.approx(0.5 / math.sqrt(3)), "cons@2": pytest.approx(0.5 / math.sqrt(3))}
    assert result.questions == 3


def test_a_suite_whose_grader_is_down_has_no_result(raises: Raises) -> None:
    down = Score(0.0, valid=False, outcome="infrastructure", cause="node3")
    groups = [[replace(one, score=down) for one in group] for group in GROUPS]
    evaluation = Evaluation(measure(groups), Samples([one for group in groups for one in group]))
    with raises(InfrastructureError, "infrastructure", 6, "node3"):
        suite_result(find_suite("aime24", ["num_generations=2"]), evaluation)


def test_sampling_of_a_suite_does_not_depend_on_the_run() -> None:
    from nemorl.config.models import GenerationConfig

    run = GenerationConfig(temperature=0.3, top_p=0.5, top_k=5, min_p=0.1, max_new_tokens=9)
    assert find_suite("aime24").settings.sampling(run) == SamplingParams(0.6, 0.95, None, 0.0, 32768)
