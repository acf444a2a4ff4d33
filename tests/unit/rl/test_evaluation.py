"""pass@k and evaluation, by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.contracts.environment import Environment
from nemorl.errors import ConfigError, DataError, UsageError
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt, Sample, Samples, SamplingParams, Score, Step
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool, RewardFunction
from nemorl_rl.evaluation.evaluation import (
    Evaluation,
    Evaluator,
    _combined,
    eval_record,
    evaluate,
    held_out_rows,
    measure,
)
from nemorl_rl.evaluation.voting import cons_at_k, pass_at_k
from nemorl_rl.rollouts.engine import RolloutEngine
from nemorl_rl.serving.generation_policy import GenerationPolicy
from recorded_messages import Raises


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [
        (4, 0, 1, 0.0),
        (4, 1, 1, 0.25),
        (4, 4, 1, 1.0),
        (4, 1, 2, 0.5),  # 1 - C(3,2) / C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2) / C(4,2) = 1 - 1/6
        (4, 1, 4, 1.0),
        (5, 3, 3, 1.0),  # only 2 are wrong, so 3 cannot all be
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_counts_all_choices_of_k(correct: int, k: int) -> None:
    right = [index < correct for index in range(5)]
    choices = list(itertools.combinations(right, k))
    assert pass_at_k(5, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        # One response at a time is as good as its answer; all three together: two of three say A, which is right.
        # Of the pairs AA, AB, AB the first is right and the others are ties, worth a half: (1 + 1/2 + 1/2) / 3.
        ("AAB", [True, True, False], [2 / 3, 2 / 3, 1.0]),
        ("AAB", [False, False, True], [1 / 3, 1 / 3, 0.0]),
        ("AB", [True, False], [0.5, 0.5]),
        # The one without an answer (-) does not vote: A-, A- are won by A, -- by nobody.
        ("A--", [True, False, False], [1 / 3, 2 / 3, 1.0]),
        ("--", [False, False], [0.0, 0.0]),
        # Graders may disagree with themselves (time-outs): A was right once in two, which is not most times.
        ("AA", [True, False], [0.0, 0.0]),
    ],
)
def test_cons_at_k_by_hand(answers: str, correct: list[bool], expected: list[float]) -> None:
    assert cons_at_k([None if a == "-" else a for a in answers], correct) == pytest.approx(expected)


def counted(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """cons@k over every subset, one by one."""
    votes = Counter(answers)
    right = Counter(answer for answer, is_right in zip(answers, correct, strict=True) if is_right)
    worth, subsets = Fraction(0), list(itertools.combinations(answers, k))
    for subset in subsets:
        ballot = Counter(answer for answer in subset if answer is not None)
        leaders = [answer for answer in ballot if ballot[answer] == max(ballot.values())]
        worth += Fraction(sum(2 * right[answer] > votes[answer] for answer in leaders), max(1, len(leaders)))
    return float(worth / len(subsets))


@pytest.mark.parametrize("seed", range(20))
def test_cons_at_k_counts_all_choices_of_k(seed: int) -> None:
    draw = random.Random(seed)
    answers = [draw.choice(["A", "B", "C", "D", None]) for _ in range(8)]
    correct = [answer in ("A", "C") for answer in answers]
    assert cons_at_k(answers, correct) == [counted(answers, correct, k) for k in range(1, 9)]


class Digits:
    """A generator whose sample number i answers the digit i, then ends; beyond 2 it goes on until it is cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        (eos,) = self.tokenizer.stop_token_ids
        answers = []
        for request in requests:
            group = []
            for number in range(len(request.seeds)):
                ids = (*self.tokenizer.encode(str(number)), eos) if number < 3 else (*self.tokenizer.encode("999"),)
                group.append(Completion(ids, (-1.0,) * len(ids), "stop" if number < 3 else "length"))
            answers.append(group)
        return answers


@pytest.fixture
def engine(tiny_model: Path) -> RolloutEngine:
    tokenizer = Tokenizer.load(str(tiny_model))
    grade = RewardFunction(lambda prompt, response: Score(2.0 * (response in prompt), correct=response in prompt))
    policy = GenerationPolicy(LocalWorkerGroup(lambda _: Digits(tokenizer), WorkerContext(), "digits"))
    return RolloutEngine(policy, EnvironmentPool(grade), tokenizer, max_sequence_tokens=32)


def prompts(engine: RolloutEngine, *texts: str) -> list[Prompt]:
    return [Prompt(index, text, tuple(engine.tokenizer.encode(text))) for index, text in enumerate(texts)]


def test_evaluation_by_hand(engine: RolloutEngine) -> None:
    # Answers 0 | 1 | 2 | 999. The first prompt contains 0 and 1, the second 2, the third none.
    evaluation = evaluate(engine, prompts(engine, "01", "2", "7"), num_generations=4, sampling=SamplingParams(), seed=1)
    assert evaluation.metrics == pytest.approx(
        {
            "accuracy": 3 / 12,
            "reward": 6 / 12,
            "avg_length": 9 / 4,  # 2, 2, 2 and 3 tokens
            "truncation_rate": 1 / 4,
            "pass@1": (2 / 4 + 1 / 4 + 0) / 3,
            "pass@2": (5 / 6 + 1 / 2 + 0) / 3,
            "pass@3": (1 + 3 / 4 + 0) / 3,
            "pass@4": 2 / 3,
        }
    )
    assert len(evaluation.samples) == 12
    assert evaluation.metrics["pass@1"] == pytest.approx(evaluation.metrics["accuracy"])


def test_one_response_per_prompt_has_no_pass_at_k(engine: RolloutEngine) -> None:
    evaluation = evaluate(engine, prompts(engine, "0", "7"), num_generations=1, sampling=SamplingParams(), seed=1)
    assert evaluation.metrics == {"accuracy": 0.5, "reward": 1.0, "avg_length": 2.0, "truncation_rate": 0.0}


def test_the_majority_is_measured_where_answers_are_told_apart(engine: RolloutEngine) -> None:
    def grade(prompt: str, response: str) -> Score:
        right = response in prompt
        return Score(float(right), correct=right, answer="right" if right else response)

    engine.environments = EnvironmentPool(RewardFunction(grade))
    # Answers 0 | 1 | 2 | 999: two say "right" for the first prompt, none for the second.
    metrics = evaluate(engine, prompts(engine, "01", "7"), num_generations=4, sampling=SamplingParams(), seed=1).metrics
    # Of two among right, right, 2, 999: one pair is right, four are ties, one is wrong: (1 + 4/2) / 6.
    assert metrics["cons@2"] == pytest.approx((3 / 6 + 0) / 2)
    assert metrics["cons@4"] == pytest.approx((1 + 0) / 2)
    assert metrics["cons@1"] == pytest.approx(metrics["pass@1"])


class Countdown(Environment):
    """Asks again until the third answer, which is right."""

    def start(self, prompt: Prompt) -> Any:
        class Conversation:
            turn = 0

            def step(self, response: str) -> Step:
                self.turn += 1
                is_last = self.turn == 3
                return Step(Score(0.5, correct=is_last), None if is_last else "again", done=is_last)

        return Conversation()


@pytest.mark.parametrize(("max_turns", "accuracy", "turns"), [(1, 0.0, 1), (2, 0.0, 2), (3, 1.0, 3), (9, 1.0, 3)])
def test_an_episode_takes_as_many_turns_as_it_may(
    engine: RolloutEngine, max_turns: int, accuracy: float, turns: int
) -> None:
    engine.environments = EnvironmentPool(Countdown())
    tasks = prompts(engine, "0", "1")
    evaluation = evaluate(engine, tasks, num_generations=1, sampling=SamplingParams(), seed=1, max_turns=max_turns)
    assert evaluation.metrics["accuracy"] == accuracy
    assert evaluation.metrics["reward"] == 0.5 * turns
    assert evaluation.metrics.get("avg_turns", 1.0) == turns


def test_prompts_in_several_batches_give_the_same(engine: RolloutEngine) -> None:
    tasks = prompts(engine, "01", "2", "7", "0", "12")
    seen: list[int] = []

    def on_group(group: Sequence[Sample]) -> None:
        seen.append(group[0].prompt.index)

    options: dict[str, Any] = {"num_generations": 2, "sampling": SamplingParams(), "seed": 1}
    whole = evaluate(engine, tasks, **options)
    parts = evaluate(engine, tasks, batch_size=2, on_group=on_group, **options)
    assert parts.metrics == whole.metrics
    assert list(parts.samples) == list(whole.samples)
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_nothing_measures_as_nothing() -> None:
    assert measure([]) == {"accuracy": 0.0, "reward": 0.0, "avg_length": 0.0, "truncation_rate": 0.0}


def config(model: Path, **changes: Any) -> Any:
    data = {"name": "arithmetic", "max_digits": 1, "num_train": 20, "num_validation": 5}
    return load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "policy": {"init": "random", "max_sequence_tokens": 32},
            "generation": {"max_new_tokens": 3},
            "validation": {"max_samples": 4},
            "data": data,
            "environment": {"name": "math", "require_marker": True},
            **changes,
        },
        for_launch=True,
    )


def evaluated(settings: Any) -> Evaluation:
    with Evaluator(settings) as evaluator:
        return evaluator.evaluate(held_out_rows(settings))


def test_a_config_is_evaluated_without_a_training_policy(tiny_model: Path) -> None:
    evaluation = evaluated(config(tiny_model))
    assert len(evaluation.samples) == 4
    assert all(math.isfinite(value) for value in evaluation.metrics.values())
    assert evaluated(config(tiny_model)).metrics == evaluation.metrics


def test_evaluation_without_held_out_rows_is_refused(tiny_model: Path, raises: Raises) -> None:
    data = {"name": "arithmetic", "max_digits": 1, "num_train": 20, "num_validation": 0}
    with raises(DataError):
        held_out_rows(config(tiny_model, data=data))


def test_several_seeds_give_a_mean_and_its_standard_error(tiny_model: Path) -> None:
    settings = config(tiny_model, validation={"max_samples": 4, "temperature": 1.0, "num_generations": 2})
    seen: Counter[int] = Counter()

    def on_group(seed: int, group: Sequence[Sample]) -> None:
        seen[seed] += len(group)

    with Evaluator(settings) as evaluator:
        rows = held_out_rows(settings)
        three, one = evaluator.evaluate(rows, seeds=3, on_group=on_group), evaluator.evaluate(rows)
    assert seen == {0: 8, 1: 8, 2: 8}
    by_seed = [three.samples[start : start + 8] for start in (0, 8, 16)]
    assert list(by_seed[0]) == list(one.samples)  # the first is what one seed would be
    assert by_seed[0][0].token_ids != by_seed[1][0].token_ids or by_seed[0][1].token_ids != by_seed[1][1].token_ids
    lengths = [sum(sample.response_tokens for sample in part) / 8 for part in by_seed]
    mean = sum(lengths) / 3
    assert three.metrics["avg_length"] == pytest.approx(mean)
    deviation = math.sqrt(sum((length - mean) ** 2 for length in lengths) / 2)  # of a sample: n - 1
    assert three.standard_errors["avg_length"] == pytest.approx(deviation / math.sqrt(3))
    assert set(three.standard_errors) == set(three.metrics)
    assert one.standard_errors == {}


def test_seeds_count_together_whichever_of_them_failed() -> None:
    whole, half, none = {"accuracy": 0.5}, {"accuracy": 1.0, "failed_frac": 0.5}, {"failed_frac": 1.0}
    for order in itertools.permutations([whole, half, none]):
        found = _combined([Evaluation(metrics, Samples([])) for metrics in order])
        assert found.metrics == {"accuracy": 0.75, "failed_frac": 0.5}  # (0 + 0.5 + 1) / 3
        assert found.standard_errors["accuracy"] == pytest.approx(0.25)


def test_seeds_of_a_greedy_evaluation_are_refused(tiny_model: Path, raises: Raises) -> None:
    with Evaluator(config(tiny_model)) as evaluator, raises(UsageError):
        evaluator.evaluate([{"prompt": "1+1=", "answer": "2"}], seeds=2)


def test_an_evaluation_without_a_judge_is_refused(tiny_model: Path, raises: Raises) -> None:
    with raises(UsageError):
        Evaluator(config(tiny_model).model_copy(update={"environment": None}))


def test_a_record_has_what_is_needed_to_count_again(engine: RolloutEngine) -> None:
    evaluation = evaluate(engine, prompts(engine, "0"), num_generations=1, sampling=SamplingParams(), seed=1)
    record = eval_record(evaluation.samples[0], "mine", 2)
    assert {key: record[key] for key in ("dataset", "seed", "index", "given", "correct", "turns")} == {
        "dataset": "mine",
        "seed": 2,
        "index": 0,
        "given": None,
        "correct": True,
        "turns": 1,
    }


def test_validation_samples_as_generation_does_but_for_what_it_sets(tiny_model: Path) -> None:
    generation = {"top_p": 0.9, "top_k": 50, "max_new_tokens": 4, "stop_strings": ["x"]}
    plain = config(tiny_model, generation=generation, validation={})
    assert plain.validation.sampling(plain.generation) == SamplingParams(0.0, 0.9, 50, 0.0, 4, ("x",))
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.1, "max_new_tokens": 9}
    other = config(tiny_model, generation=generation, validation=own)
    assert other.validation.sampling(other.generation) == SamplingParams(0.6, 0.95, None, 0.1, 9, ("x",))


def test_validation_leaves_room_for_a_prompt(tiny_model: Path, raises: Raises) -> None:
    with raises(ConfigError, 64, path="validation.max_new_tokens"):
        config(tiny_model, policy={"max_sequence_tokens": 64}, validation={"max_new_tokens": 64})
