import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from nemorl.errors import DataError, PluginError, UsageError
from nemorl.types import Prompt
from nemorl_math_env import MathConfig
from nemorl_math_env.environment import MathEnvironment
from nemorl_rl.environments import EnvironmentPool
from recorded_messages import Raises

HANG, CRASH, RAISE = "a+1001", "a+1002", "a+1003"
"""Formulas that are left to the grader, and what it does with them."""


def moody_grader(truth, answer):
    """Does what the answer tells it to. Runs in a worker process."""
    if answer == HANG:
        time.sleep(60)
    if answer == CRASH:
        os._exit(3)
    if answer == RAISE:
        raise RecursionError("deep")
    return "right" if answer == f"{truth}+0" else "wrong"


def prompt(answer):
    return Prompt(index=0, text="?", token_ids=(1,), answer=answer)


@pytest.fixture(scope="module")
def math():
    environment = MathConfig(workers=1).build()
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def moody():
    environment = MathEnvironment(MathConfig(timeout_s=2, workers=2), grader=moody_grader)
    yield environment
    environment.close()


def test_numbers_are_graded_without_starting_a_process():
    environment = MathConfig().build()
    score = environment.score(prompt("19"), "12+7=19")
    assert (score.reward, score.correct) == (1.0, True)
    assert score.metrics == {"grader_timeout": 0.0, "grader_crash": 0.0, "unparsable": 0.0}
    wrong = environment.score(prompt("19"), "The answer is 18, not 19? No: 20")
    assert (wrong.reward, wrong.correct) == (0.0, False)
    assert not environment.pool.started
    environment.close()


@pytest.mark.parametrize(
    "response", ["19 then 20", "12+7", "19, 20", r"\boxed{19} no, \boxed{20}", "Answer: 19\n#### 20"]
)
def test_containing_the_right_number_is_not_enough(math, response):
    assert math.outcome("19", response) == "wrong"


def test_an_empty_response_is_unparsable(math):
    score = math.score(prompt("19"), "")
    assert (score.reward, score.correct, score.metrics["unparsable"]) == (0.0, False, 1.0)


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("x^2+2x+1", "(x+1)^2"),
        ("(x+1)^2", "The answer is $x^2+2x+1$."),
        ("1/3", "0.333333"),
        (r"\frac{\sqrt{3}}{2}", r"\boxed{\sqrt3/2}"),
        (r"\{1,2\}", r"\boxed{\{2,1\}}"),
        ("50", "50%"),
        (r"\sqrt{2}", "1.414213562373095"),  # more digits than a double is printed with
        ("1.41421356237309504880", r"\boxed{\sqrt{2}}"),
    ],
)
def test_algebraically_equal_answers_are_right(math, answer, response):
    assert math.outcome(answer, response) == "right"


@pytest.mark.parametrize(
    ("answer", "response"),
    [("x^2+2x+1", "(x+2)^2"), ("12", r"\boxed{5, 12}"), ("0.5", r"\boxed{\pi}"), (r"\sqrt{2}", "1.4142135623730952")],
)
def test_algebraically_different_answers_are_wrong(math, answer, response):
    assert math.outcome(answer, response) == "wrong"


@pytest.mark.slow
def test_a_hanging_grader_scores_zero_is_counted_and_the_next_answer_is_graded(moody):
    started = time.monotonic()
    score = moody.score(prompt("a"), HANG)
    assert (score.reward, score.metrics["grader_timeout"]) == (0.0, 1.0)
    assert time.monotonic() - started < 10
    assert moody.score(prompt("a"), "a+0").reward == 1.0


@pytest.mark.slow
def test_a_crashing_grader_scores_zero_is_counted_and_the_next_answer_is_graded(moody):
    score = moody.score(prompt("a"), CRASH)
    assert (score.reward, score.metrics["grader_crash"]) == (0.0, 1.0)
    assert moody.score(prompt("a"), "a+0").reward == 1.0


def test_a_raising_grader_counts_as_a_crash(moody):
    assert moody.outcome("a", RAISE) == "crash"


@pytest.mark.slow
def test_a_grader_killed_as_it_starts_costs_no_verdict():
    environment = MathConfig(workers=1).build()
    with ThreadPoolExecutor(1) as threads:
        verdict = threads.submit(environment.outcome, "x+1", "1+x")
        while not (killed := multiprocessing.active_children()):
            time.sleep(0.01)
        killed[0].kill()
        assert verdict.result(timeout=60) == "right"
    environment.close()


@pytest.mark.slow
def test_many_threads_each_get_their_own_verdict(moody):
    truths = [f"a+{i}" for i in range(60)] + ["a", "a"]
    responses = [f"a+{i}+0" if i % 3 else f"a+{i}+1" for i in range(60)] + [HANG, CRASH]
    with ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(moody.outcome, truths, responses))
    assert outcomes[:60] == ["right" if i % 3 else "wrong" for i in range(60)]
    assert outcomes[60:] == ["timeout", "crash"]


@pytest.mark.slow
def test_it_works_through_the_kernels_pool(moody):
    pool = EnvironmentPool(moody, timeout_s=30, concurrency=4)
    episodes = [pool.start(prompt("a")) for _ in range(4)]
    steps = pool.step(episodes, ["a+0", "a+1", CRASH, ""])
    assert [step.score.reward for step in steps] == [1.0, 0.0, 0.0, 0.0]
    assert all(step.done for step in steps)


@pytest.mark.slow
def test_closing_frees_a_waiting_thread_and_later_algebra_is_refused(raises: Raises):
    environment = MathEnvironment(MathConfig(timeout_s=30, workers=1), grader=moody_grader)
    assert environment.outcome("a", "a+0") == "right"
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(environment.outcome, "a", HANG) for _ in range(3)]  # two of them in line
        time.sleep(0.5)
        started = time.monotonic()
        environment.close()
        environment.close()
        assert [each.result(timeout=10) for each in waiting] == ["timeout"] * 3
        assert time.monotonic() - started < 10
    with raises(UsageError):
        environment.outcome("a", "a+7")


def test_a_pool_that_cannot_start_is_an_error_and_not_a_zero(raises: Raises):
    # 1 MiB of address space: no interpreter gets anywhere.
    environment = MathEnvironment(MathConfig.model_construct(**{**MathConfig().model_dump(), "memory_gib": 1 / 1024}))
    with raises(PluginError):
        environment.outcome("x+1", "1+x")
    environment.close()


@pytest.mark.slow
def test_an_unguarded_script_does_not_run_twice(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from nemorl_math_env import MathConfig\n"
        "print('top', flush=True)\n"
        "environment = MathConfig(workers=1).build()\n"
        "print(environment.outcome('x+1', '1+x'))\n"  # and no close(): leaving must not hang either
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["top", "right"]


def test_a_row_without_an_answer_is_an_error_that_says_how_to_name_it(math, raises: Raises):
    with raises(DataError, "answer_column"):
        math.score(prompt(None), "5")


@pytest.mark.parametrize(
    ("truth", "response", "answer"),
    [
        ("1/2", r"\boxed{0.5}", "1/2"),
        ("1/2", r"\boxed{\frac{2}{4}}", "1/2"),
        ("19", "The answer is 18.0", "18"),
        ("x^2", r"\boxed{x^{2}}", "x^2"),  # right, so it votes with all other right ones
        ("19", "I do not know", None),
    ],
)
def test_equal_answers_are_one_to_a_majority_vote(truth: str, response: str, answer: str | None) -> None:
    environment = MathConfig().build()
    try:
        score = environment.score(Prompt(0, "task", (), answer=truth), response)
    finally:
        environment.close()
    assert score.answer == answer  # type: ignore[union-attr]
