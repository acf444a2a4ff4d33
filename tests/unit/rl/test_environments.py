"""Reward functions, environments and the pool that steps them at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import nemorl
import numpy as np
import pytest
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError, ForeignError, UsageError
from nemorl.types import Prompt, Score, Step
from nemorl_rl.environments import EnvironmentPool, FunctionalRewardWrapper, RewardFunction
from nemorl_rl.environments.sources import as_environment
from recorded_messages import Raises

PROMPT = Prompt(0, "1+1=", (1, 2), answer="2", row={"prompt": "1+1=", "level": 3})


def step(environment: Environment, responses: list[str], **options: Any) -> list[Step]:
    pool = EnvironmentPool(environment, **options)
    return pool.step([pool.start(PROMPT) for _ in responses], responses)


def rewards(steps: list[Step]) -> list[float]:
    return [step.score.reward for step in steps]


# Reward functions


def test_a_function_gets_texts_and_the_columns_it_names() -> None:
    def grade(prompt: str, response: str, answer: str, level: int) -> float:
        assert prompt == "1+1="
        return level * float(response == answer)

    assert rewards(step(RewardFunction(grade), ["2", "3"])) == [3.0, 0.0]


def test_a_function_may_name_its_arguments_as_it_likes_and_have_defaults() -> None:
    assert rewards(step(RewardFunction(lambda p, r, colour="red": len(p) + len(r) + len(colour)), ["2"])) == [8.0]


def test_an_object_that_can_be_called_is_a_reward_function() -> None:
    class Length:
        def __call__(self, prompt: str, response: str) -> int:
            return len(response)

    environment = RewardFunction(Length())
    assert environment.name == "Length"
    assert rewards(step(environment, ["abc"])) == [3.0]


@pytest.mark.parametrize("result", [True, 1, 1.0, Score(1.0)], ids=repr)
def test_a_reward_is_a_number_or_a_score(result: Any) -> None:
    (only,) = step(RewardFunction(lambda prompt, response: result), ["x"])
    assert only.score.reward == 1.0
    assert isinstance(only.score.reward, float)
    assert only.done


def test_a_score_keeps_its_parts() -> None:
    score = Score(0.5, {"format": 1.0}, {"parsed": 1.0}, correct=True)
    assert step(RewardFunction(lambda prompt, response: score), ["x"])[0].score is score


@pytest.mark.parametrize(
    "function", [lambda response: 1.0, lambda: 1.0, lambda *texts: 1.0], ids=["one", "none", "star"]
)
def test_a_function_of_fewer_arguments_is_refused(function: Any, raises: Raises) -> None:
    with raises(UsageError):
        RewardFunction(function)


def test_a_column_that_the_row_lacks_is_told_as_python_tells_it(raises: Raises) -> None:
    def grade(prompt: str, response: str, solution: str) -> float:
        return 0.0

    with raises(ForeignError, "grade", "TypeError", "solution"):
        step(RewardFunction(grade), ["x"])


@pytest.mark.parametrize("result", [None, "good", "1.0", [], {}], ids=repr)
def test_a_reward_that_is_no_number_names_its_function(result: Any, raises: Raises) -> None:
    def grade(prompt: str, response: str) -> Any:
        return result

    with raises(UsageError, "grade", repr(result), type(result).__name__):
        step(RewardFunction(grade), ["x"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(value: float, raises: Raises) -> None:
    # One NaN would turn its whole group's advantages, and with them the update, into NaN.
    with raises(ForeignError, "x", 0):
        step(RewardFunction(lambda prompt, response: value), ["x"])


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), None, "much", 10**400], ids=lambda value: f"{value!r:.6}"
)
@pytest.mark.parametrize("part", ["components", "metrics"])
def test_a_part_of_a_score_that_is_not_finite_names_environment_part_and_row(part: str, value: Any) -> None:
    def grade(prompt: str, response: str) -> Score:
        return Score(1.0, **{part: {"right": 1.0, "format": value if response == "y" else 0.5}})

    with contextlib.closing(EnvironmentPool(RewardFunction(grade))) as pool:
        episodes = [pool.start(Prompt(index, f"{index}+1=", (), row={})) for index in range(2)]
        with pytest.raises(ForeignError) as caught:
            pool.step(episodes, ["x", "y"])
    for word in ("environment 'grade'", f"{part[:-1]} 'format'", "'y' to prompt 1 ('1+1=')", "not a finite number"):
        assert word in caught.value.message


def test_what_a_turn_earned_is_finite(raises: Raises) -> None:
    with raises(ForeignError, "turn", "nan"):
        step(RewardFunction(lambda prompt, response: Score(1.0, turn_rewards=(1.0, float("nan")))), ["x"])


def _ways_to_raise(error: BaseException) -> dict[str, Any]:
    def batched(prompts: list[str], responses: list[str]) -> list[float]:
        raise error

    async def later(prompt: str, response: str) -> float:
        raise error

    async def in_a_task(prompt: str, response: str) -> float:
        return await asyncio.create_task(later(prompt, response))

    async def all_later(prompts: list[str], responses: list[str]) -> list[float]:
        raise error

    def now(prompt: str, response: str) -> float:
        raise error

    return {f.__name__: f for f in (now, batched, later, in_a_task, all_later)}


@pytest.mark.parametrize("way", ["now", "batched", "later", "in_a_task", "all_later"])
@pytest.mark.parametrize(
    "error", [StopIteration(1), StopAsyncIteration(1), SystemExit(1), KeyboardInterrupt(1), GeneratorExit(1)], ids=repr
)
def test_whatever_a_reward_raises_wherever_it_runs_is_its_error_and_no_time_out(
    way: str, error: BaseException, raises: Raises
) -> None:
    function = _ways_to_raise(error)[way]
    with contextlib.closing(EnvironmentPool(RewardFunction(function), timeout_s=60)) as pool:
        for _ in range(2):  # the second turn finds the event loop alive
            episodes = [pool.start(Prompt(0, "p", ()))] * 3
            with raises(ForeignError, way, type(error).__name__):
                pool.step(episodes, ["x", "y", "z"])


def test_a_task_that_exits_unheard_takes_no_other_with_it() -> None:
    async def grade(prompt: str, response: str) -> float:
        async def exits() -> None:
            raise SystemExit(0)

        exiting = asyncio.create_task(exits())
        await asyncio.sleep(0.01)
        assert isinstance(exiting.exception(), SystemExit)
        return 1.0

    assert rewards(step(RewardFunction(grade), ["a", "b", "c"])) == [1.0, 1.0, 1.0]


def test_a_function_of_all_columns_gets_them_but_for_the_names_it_takes_itself() -> None:
    def grade(prompt: str, response: str, **columns: Any) -> float:
        assert columns == {"answer": "2", "level": 3}
        return 1.0

    assert rewards(step(RewardFunction(grade), ["2"])) == [1.0]


# Batched functions


def test_a_batched_function_is_called_once_with_the_whole_turn() -> None:
    calls = []

    def grade(prompts: list[str], responses: list[str], level: list[int]) -> list[float]:
        calls.append((prompts, sorted(responses), level))
        return [float(response) for response in responses]

    responses = [str(number) for number in range(40)]
    # 40 responses, 3 at a time: what is bounded is what runs, not what waits for its batch.
    assert rewards(step(RewardFunction(grade), responses, concurrency=3)) == [float(n) for n in range(40)]
    assert calls == [(["1+1="] * 40, sorted(responses), [3] * 40)]


def test_an_async_batched_function_is_called_once_too() -> None:
    sizes = []

    async def grade(prompts: list[str], responses: list[str]) -> list[Score]:
        sizes.append(len(prompts))
        await asyncio.sleep(0.001)
        return [Score(float(len(response)), correct=True) for response in responses]

    steps = step(RewardFunction(grade), ["a", "bb", "ccc"])
    assert rewards(steps) == [1.0, 2.0, 3.0]
    assert steps[2].score.correct
    assert sizes == [3]


def test_each_turn_is_a_batch_of_its_own() -> None:
    sizes = []

    def grade(prompts: list[str], responses: list[str]) -> list[float]:
        sizes.append(len(prompts))
        return [0.0] * len(prompts)

    pool = EnvironmentPool(RewardFunction(grade))
    for count in (4, 7):
        pool.step([pool.start(PROMPT) for _ in range(count)], ["x"] * count)
    assert sizes == [4, 7]


def test_a_wrapper_names_the_function_and_says_that_it_is_batched() -> None:
    environment = FunctionalRewardWrapper(lambda p, r: [1.0] * len(p), name="ones", batched=True)
    assert (environment.name, environment.batched) == ("ones", True)
    assert rewards(step(environment, ["x", "y"])) == [1.0, 1.0]
    assert nemorl.FunctionalRewardWrapper is nemorl.RewardFunction


def test_a_function_with_the_names_of_lists_may_say_that_it_takes_one_response() -> None:
    environment = RewardFunction(lambda prompts, responses: float(len(responses)), batched=False)
    assert rewards(step(environment, ["abc", "d"])) == [3.0, 1.0]


def test_a_column_that_some_rows_lack_is_none_there_and_one_that_all_lack_is_left_out() -> None:
    seen = []

    def grade(prompts: list[str], responses: list[str], level: Any, hint: str = "default") -> list[float]:
        seen.append((level, hint))
        return [0.0] * len(prompts)

    pool = EnvironmentPool(RewardFunction(grade), concurrency=1)
    pool.step([pool.start(PROMPT), pool.start(Prompt(1, "x", (1,)))], ["a", "b"])
    assert seen == [([3, None], "default")]


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        ([1.0], 1),
        ([1.0] * 3, 3),
        (1.0, "float"),
        (None, "NoneType"),
        ("ab", "str"),
        ({0: 1.0, 1: 1.0}, "dict"),
    ],
    ids=repr,
)
def test_a_batched_function_must_return_one_number_per_response(result: Any, seen: object, raises: Raises) -> None:
    with raises(UsageError, "grade", 2, seen):
        step(RewardFunction(lambda prompts, responses: result, name="grade"), ["x", "y"])


def test_a_batched_function_that_returns_no_numbers_or_raises_is_named(raises: Raises) -> None:
    def grade(prompts: list[str], responses: list[str]) -> Any:
        return [1.0, "good"] if responses != ["boom"] else 1 / 0

    with raises(UsageError, "grade", "good"):
        step(RewardFunction(grade), ["x", "y"])
    with raises(ForeignError, "grade", "ZeroDivisionError"):
        step(RewardFunction(grade), ["boom"])


def test_a_batch_that_takes_too_long_costs_one_timeout_in_all() -> None:
    release = threading.Event()

    def grade(prompts: list[str], responses: list[str]) -> list[float]:
        release.wait(30)
        return [1.0] * len(prompts)

    steps = step(RewardFunction(grade), ["x"] * 50, timeout_s=0.2, concurrency=4)
    release.set()
    assert [s.score.metrics for s in steps] == [{"environment_timeout": 1.0}] * 50


# Async functions


def test_async_functions_run_at_the_same_time() -> None:
    arrived = []
    everyone = threading.Event()

    async def grade(prompt: str, response: str) -> float:
        arrived.append(response)
        if len(arrived) == 3:
            everyone.set()
        while not everyone.is_set():  # one after another would never get past this
            await asyncio.sleep(0.001)
        return float(response)

    assert rewards(step(RewardFunction(grade), ["1", "2", "3"], timeout_s=20)) == [1.0, 2.0, 3.0]


def test_an_async_function_that_raises_is_named(raises: Raises) -> None:
    async def grade(prompt: str, response: str) -> float:
        raise OSError("judge is down")

    with raises(ForeignError, "grade", "OSError") as caught:
        step(RewardFunction(grade), ["x"])
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("source", "kind"), [(lambda p, r: 0, RewardFunction), (Environment(), Environment), (None, type(None))]
)
def test_whatever_scores_is_accepted(source: Any, kind: type) -> None:
    assert type(as_environment(source)) is kind


def test_an_environment_may_be_given_by_name_or_as_a_mapping(raises: Raises) -> None:
    by_name, by_mapping = as_environment("math"), as_environment({"name": "math", "timeout_s": 3})
    assert by_name is not None
    assert by_mapping is not None
    assert by_name.name == by_mapping.name == "math"
    with raises(UsageError, "maths") as caught:
        as_environment("maths")
    assert "math" in str(caught.value.fix) + str(caught.value)


def test_what_cannot_score_is_refused(raises: Raises) -> None:
    with raises(UsageError, 3):
        as_environment(3)


# The pool


class ByName(Environment):
    """Does what the response says."""

    name = "by-name"

    def __init__(self) -> None:
        self.closed = 0
        self.release = threading.Event()
        self.running = self.most = 0
        self.lock = threading.Lock()

    def score(self, prompt: Prompt, response: str) -> float:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            if response == "stuck":
                self.release.wait(30)
            if response == "raise":
                raise ZeroDivisionError("no")
            if response == "ours":
                raise DataError("row 3 is odd", fix="mend it")
            time.sleep(0.02)
            return float(len(response))
        finally:
            with self.lock:
                self.running -= 1

    def close(self) -> None:
        self.closed += 1


LIMIT_S = 1.0
"""Time limit of a step in tests where some answer and some do not: on a busy machine an answer takes a while too."""


def test_results_come_in_the_order_of_the_responses() -> None:
    assert rewards(step(ByName(), ["a" * size for size in range(20, 0, -1)])) == [float(n) for n in range(20, 0, -1)]


def test_no_more_than_the_allowed_number_run_at_once() -> None:
    environment = ByName()
    step(environment, ["a"] * 9, concurrency=3)
    assert environment.most == 3


def test_a_stuck_step_scores_zero_is_counted_and_holds_up_nobody() -> None:
    environment = ByName()
    steps = step(environment, ["aa", "stuck", "aaa"], timeout_s=LIMIT_S)
    environment.release.set()
    assert rewards(steps) == [2.0, 0.0, 3.0]
    assert [s.score.metrics.get("environment_timeout") for s in steps] == [None, 1.0, None]
    assert steps[1].done


def test_a_pool_goes_on_after_a_timeout() -> None:
    environment = ByName()
    pool = EnvironmentPool(environment, timeout_s=LIMIT_S, concurrency=1)
    assert rewards(pool.step([pool.start(PROMPT)], ["stuck"])) == [0.0]
    assert rewards(pool.step([pool.start(PROMPT)], ["aa"])) == [2.0]
    environment.release.set()


def test_many_slow_steps_are_not_mistaken_for_a_stuck_one() -> None:
    # 60 steps of 0.02 s on one thread take 1.2 s, each far less than the limit of 1 s.
    assert rewards(step(ByName(), ["aa"] * 60, timeout_s=LIMIT_S, concurrency=1)) == [2.0] * 60


def test_a_stuck_step_is_replaced_so_that_the_others_are_still_scored() -> None:
    # Two threads, one of them stuck: the other does 8 steps of 0.02 s, and a third one takes the stuck one's place.
    environment = ByName()
    responses = ["stuck", *["aa"] * 8]
    steps = step(environment, responses, timeout_s=LIMIT_S, concurrency=2)
    environment.release.set()
    assert rewards(steps) == [0.0, *[2.0] * 8]


def test_a_dead_environment_costs_one_timeout_and_not_one_per_response() -> None:
    environment = ByName()
    began = []
    inner = environment.score

    def score(prompt: Prompt, response: str) -> float:
        began.append(response)
        return inner(prompt, response)

    environment.score = score  # type: ignore[method-assign]
    steps = step(environment, ["stuck"] * 20, timeout_s=0.2, concurrency=2)
    environment.release.set()
    assert [s.score.metrics for s in steps] == [{"environment_timeout": 1.0}] * 20
    assert len(began) <= 4  # the two that were given up, and at most two that took their places


class Waiting(Environment):
    """Async: waits for what the response says: seconds, or until so many responses are being waited for."""

    name = "waiting"

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.loops: set[int] = set()
        self.running = self.most = 0
        self.cancelled: list[str] = []

    async def score(self, prompt: Prompt, response: str) -> float:  # type: ignore[override]
        self.threads.add(threading.get_ident())
        self.loops.add(id(asyncio.get_running_loop()))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if response == "block":
                time.sleep(1.3 * LIMIT_S)
            elif response.startswith("until "):
                while self.running < int(response.removeprefix("until ")):
                    await asyncio.sleep(0.001)
            else:
                await asyncio.sleep(float(response))
        except asyncio.CancelledError:
            self.cancelled.append(response)
            raise
        finally:
            self.running -= 1
        return 1.0


def test_coroutines_share_one_thread_and_one_loop_over_all_turns() -> None:
    environment = Waiting()
    pool = EnvironmentPool(environment, concurrency=200)
    for _ in range(2):
        assert rewards(pool.step([pool.start(PROMPT) for _ in range(200)], ["0.3"] * 200)) == [1.0] * 200
    assert (len(environment.threads), len(environment.loops)) == (1, 1)
    assert environment.most > 100  # 0.3 s are long enough for nearly all to start


def test_no_more_coroutines_than_allowed_run_at_once() -> None:
    environment = Waiting()
    assert rewards(step(environment, ["0.01"] * 12, concurrency=3)) == [1.0] * 12
    assert environment.most == 3


def test_a_coroutine_that_takes_too_long_is_cancelled_and_counted() -> None:
    environment = Waiting()
    pool = EnvironmentPool(environment, timeout_s=LIMIT_S, concurrency=4)
    steps = pool.step([pool.start(PROMPT) for _ in range(4)], ["0.01", "30", "0.01", "0.02"])
    assert rewards(steps) == [1.0, 0.0, 1.0, 1.0]
    assert steps[1].score.metrics == {"environment_timeout": 1.0}
    assert rewards(pool.step([pool.start(PROMPT)], ["0.01"])) == [1.0]
    assert environment.cancelled == ["30"]


def test_waiting_for_a_slot_does_not_count_as_time_of_the_coroutine() -> None:
    # 12 steps of 0.1 s, one at a time, take 1.2 s; each is far below the limit of 1 s.
    assert rewards(step(Waiting(), ["0.1"] * 12, timeout_s=LIMIT_S, concurrency=1)) == [1.0] * 12


def test_a_coroutine_that_blocks_the_loop_does_not_take_later_turns_with_it() -> None:
    environment = Waiting()
    pool = EnvironmentPool(environment, timeout_s=LIMIT_S)
    assert rewards(pool.step([pool.start(PROMPT)], ["block"])) == [0.0]
    assert rewards(pool.step([pool.start(PROMPT)], ["0.01"])) == [1.0]


def test_a_blocked_loop_is_replaced_although_others_of_its_turn_were_answered() -> None:
    environment = Waiting()
    pool = EnvironmentPool(environment, timeout_s=LIMIT_S)
    turn = pool.step([pool.start(PROMPT) for _ in range(3)], ["0", "0.01", "block"])
    assert rewards(turn)[2] == 0.0
    assert rewards(pool.step([pool.start(PROMPT)], ["0.01"])) == [1.0]


def test_a_pool_can_be_left_in_the_middle_of_a_turn() -> None:
    environment = Waiting()
    pool = EnvironmentPool(environment, concurrency=4)
    turn = pool.stream([pool.start(PROMPT) for _ in range(4)], ["until 4", "30", "30", "30"])
    assert next(turn)[0] == 0
    turn.close()  # type: ignore[attr-defined]
    assert rewards(pool.step([pool.start(PROMPT)], ["0.01"])) == [1.0]
    assert environment.cancelled == ["30"] * 3


class Slow(Environment):
    """A conversation whose every turn takes a while; the first turn of a prompt named 'long' takes its all."""

    name = "slow"

    def start(self, prompt: Prompt) -> Any:
        return _SlowTalk()


class _SlowTalk:
    def step(self, response: str) -> Step:
        time.sleep(float(response))
        return Step(Score(1.0), "go on", done=False)


def test_an_episode_has_a_limit_over_all_its_turns() -> None:
    pool = EnvironmentPool(Slow(), timeout_s=30, episode_timeout_s=1.2)
    episodes = [pool.start(PROMPT), pool.start(PROMPT)]
    first = pool.step(episodes, ["0.4", "0"])
    # 0.4 s + 10 s is beyond the limit of 1.2 s; the other episode has spent nothing yet.
    second = pool.step(episodes, ["10", "0.1"])
    assert rewards(first) == [1.0, 1.0]
    assert rewards(second) == [0.0, 1.0]
    assert second[0].score.metrics == {"episode_timeout": 1.0}
    assert (second[0].done, second[1].done) == (True, False)


def test_a_step_that_exits_the_interpreter_is_an_error_of_the_environment(raises: Raises) -> None:
    def grade(prompt: str, response: str) -> float:
        raise SystemExit(3)

    with raises(ForeignError, "grade", "SystemExit", 3):
        step(RewardFunction(grade), ["x"])


def test_a_step_that_raises_ends_the_run_and_names_the_environment(raises: Raises) -> None:
    with raises(ForeignError, "by-name", "ZeroDivisionError", varies=r"\S+, line \d+"):
        step(ByName(), ["a", "raise", "a"])


def test_an_error_of_nemorls_own_passes_unchanged(raises: Raises) -> None:
    with raises(DataError, 3):
        step(ByName(), ["ours"])


def test_an_environment_that_cannot_start_is_named(raises: Raises) -> None:
    class Sleepy(Environment):
        name = "sleepy"

        def start(self, prompt: Prompt) -> Any:
            raise RuntimeError("not now")

    with raises(ForeignError, "sleepy", "RuntimeError"):
        EnvironmentPool(Sleepy()).start(PROMPT)


def test_an_environment_without_score_says_what_to_define(raises: Raises) -> None:
    with raises(ForeignError):
        step(Environment(), ["x"])


class Bare(Environment):
    """Its episodes return what they are given."""

    name = "bare"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def start(self, prompt: Prompt) -> Any:
        return self

    def step(self, response: str) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        ([0.5], 0.5),
        ((np.float64(0.5),), 0.5),
        ([0.5, 1], 1.5),
        ({"correct": np.bool_(True), "format": 0.5}, 1.5),
        (Score(0.25), 0.25),
    ],
)
def test_an_episode_may_return_what_score_may_return(answer: Any, reward: float) -> None:
    class Scoring(Environment):
        def score(self, prompt: Prompt, response: str) -> Any:
            return answer

    whole, part, scored = (
        step(Bare(answer), ["x"])[0],
        step(Bare(Step(answer, "on", done=False)), ["x"])[0],
        step(Scoring(), ["x"])[0],
    )
    assert (whole.score, whole.done, part.observation, part.done) == (part.score, True, "on", False)
    assert whole.score.reward == reward
    assert scored == whole


def test_an_episode_that_returns_no_number_names_its_environment(raises: Raises) -> None:
    for answer in ("1", None, [], {}, [[1.0]], Step("1")):  # type: ignore[arg-type]
        with raises(UsageError, "bare", "nemorl.Score"):
            step(Bare(answer), ["x"])


def test_no_episodes_take_no_time() -> None:
    assert EnvironmentPool(ByName()).step([], []) == []


def test_closing_the_pool_closes_the_environment() -> None:
    environment = ByName()
    EnvironmentPool(environment).close()
    assert environment.closed == 1


def test_the_event_loop_of_a_pool_ends_also_where_its_environment_cannot_be_closed() -> None:
    class Broken(ByName):
        def close(self) -> None:
            raise BrokenPipeError("it hangs")

    pool = EnvironmentPool(Broken())
    loop = pool.running_loop().loop
    with pytest.raises(BrokenPipeError):
        pool.close()
    end = time.monotonic() + 30.0
    while not loop.is_closed():
        assert time.monotonic() < end
        time.sleep(0.001)
