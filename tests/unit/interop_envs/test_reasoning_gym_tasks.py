"""reasoning-gym: its tasks as rows, its scorers as rewards."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nemorl.errors import DataError, NemorlError, UsageError
from nemorl.types import Prompt, Score
from nemorl_agents.interop import ReasoningGymTasksConfig
from nemorl_agents.interop.answer_forms import readings
from nemorl_agents.interop.reasoning_gym import ReasoningGym
from nemorl_rl.environments import EnvironmentPool
from pydantic import ValidationError
from recorded_messages import Raises

factory: Any = pytest.importorskip("reasoning_gym.factory", reason="reasoning-gym is not installed")
GENERATORS = sorted(factory.DATASETS.keys() - {"composite"})


def rows(**options: Any) -> list[Any]:
    made = ReasoningGymTasksConfig(**{"num_train": 6, "num_validation": 3, **options}).build("train")
    assert made is not None
    # As they come out of a file: scorers must not depend on what JSON changes.
    return [json.loads(json.dumps(row)) for row in made]


def scores(row: Any, *responses: str) -> list[Score]:
    pool = EnvironmentPool(ReasoningGym())
    prompt = Prompt(0, row["prompt"][0]["content"], (1,), answer=row["answer"], row=row)
    return [step.score for step in pool.step([pool.start(prompt) for _ in responses], responses)]


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "spell_backward", "basic_arithmetic", "sudoku"])
def test_the_answer_of_a_row_earns_the_reward(task: str) -> None:
    for row in rows(task=task, num_train=3, num_validation=1):
        right, marked, wrong = scores(row, f"<answer>{row['answer']}</answer>", row["answer"], "no idea")
        assert (right.reward, right.correct) == (1.0, True)
        assert marked.reward == 1.0
        assert wrong.reward < 1.0


def test_any_solution_counts_where_there_are_several() -> None:
    # countdown wants an expression with a value; the row's answer is one of many.
    row = next(row for row in rows(task="countdown", options={"max_numbers": 4}) if row["answer"])
    expression = row["answer"]
    assert scores(row, f"<answer>0 + {expression}</answer>")[0].reward < 1.0  # 0 is not among the numbers
    assert scores(row, f"<answer>({expression})</answer>")[0].reward == 1.0


def test_rows_are_distinct_depend_on_the_seed_and_options_reach_the_generator() -> None:
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}

    def asked(**more: Any) -> list[str]:
        return [row["prompt"][0]["content"] for row in rows(options=options, **more)]

    made = asked(num_train=20)
    assert len(set(made)) == 20
    assert made != asked(num_train=20, seed=1)
    assert made[:6] == asked()


def test_mistakes_are_told(raises: Raises) -> None:
    with raises(UsageError, "chain_sums", "chain_sum"):
        rows(task="chain_sums")
    with raises(NemorlError, "TypeError"):
        rows(options={"nonsense": 1})
    with raises(ValidationError, path="options"):
        rows(options={"size": 1})
    with raises(DataError):
        rows(options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, num_train=5000)
    with raises(DataError):
        scores({"prompt": [{"content": "x"}], "answer": "1"}, "1")


@pytest.mark.slow
@pytest.mark.parametrize("task", GENERATORS)
def test_every_generator_is_asked_for_what_a_run_uses_and_scores_its_answers(task: str) -> None:
    for row in rows(task=task, num_train=4, num_validation=2):
        assert row["reasoning_gym"]["size"] <= 24  # 4 draws for each of 6
        answer = row["answer"]
        if answer is not None:
            forms = f"<answer>{answer}</answer>", f"So:\n\n**Answer:**\n{answer}"
            assert [score.reward for score in scores(row, *forms)] == [1.0, 1.0]
        wrong, nothing = scores(row, "<answer>no idea</answer>", "")
        assert wrong.reward < 1.0
        assert nothing.reward < 1.0


def test_there_are_generators() -> None:
    assert len(GENERATORS) >= 100


def test_a_generator_that_remembers_makes_the_same_task_again() -> None:
    # list_functions draws on when a task is asked for twice, or out of turn.
    made = rows(task="list_functions", num_train=12)
    for row in reversed(made):
        assert scores(row, row["answer"])[0].reward == 1.0


def test_another_task_than_that_of_the_row_is_told(raises: Raises) -> None:
    row = rows()[0]
    row["reasoning_gym"]["seed"] = 7
    with raises(DataError, "chain_sum", 7):
        scores(row, "1")


def test_a_mixture_is_written_in_yaml(raises: Raises) -> None:
    parts = [{"name": "chain_sum", "weight": 2}, {"name": "spell_backward", "config": {"max_word_len": 4}}]
    made = rows(task="composite", options={"datasets": parts}, num_train=20)
    assert {"backward" in row["prompt"][0]["content"] for row in made} == {True, False}
    assert [scores(row, f"**Answer:** {row['answer']}")[0].reward for row in made] == [1.0] * 20
    with raises(UsageError, "chain_sums", "chain_sum"):
        rows(task="composite", options={"datasets": [{"name": "chain_sums"}]})
    for options in ({}, {"datasets": []}, {"datasets": ["chain_sum"]}, {"datasets": [{"weight": 1}]}):
        with raises(ValidationError, path="options.datasets"):
            rows(task="composite", options=options)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>1</answer> or <answer> 2 </answer>", "2"),
        ("<answer>1</answer> or \\boxed{2}", "1"),
        ("so\nAnswer: 3\nthanks", "3"),
        ("The final answer: 4", "4"),
        ("**Answer:** 12", "12"),
        ("**Answer**: 12", "12"),
        ("**Answer: 12**", "12"),
        ("Answer: 42 \u2705", "42"),
        ("### Answer:\n\n1 2\n3 4", "1 2\n3 4"),
        ("Answer:\n```\n1 2\n3 4\n```\nDone", "1 2\n3 4"),
        ("Final answer: $12$.", "12"),
        (r"so \boxed{7}", "7"),
        (r"\boxed{7}!", "7"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\text{no}}", "no"),
        (r"\boxed{2\cdot\boxed{42}}", r"2\cdot\boxed{42}"),
        (r"\boxed{3} and \boxed{4", "3"),
        (" 5\n", "5"),
        ("", ""),
    ],
)
def test_the_last_tagged_answer_counts_else_the_last_box_or_marked_line_else_all(response: str, answer: str) -> None:
    assert readings(response)[-1] == answer


@pytest.mark.parametrize("before", ["", "Answer: "])
@pytest.mark.parametrize(
    "part", ["<answer>", "</answer>", "answer ", "answer:", "\\boxed{", "{", "**", "`", "~", "\n", " "]
)
def test_no_response_takes_long_to_read(part: str, before: str) -> None:
    assert readings(before + part * (100_000 // len(part)) + "x")[0].endswith("x")
