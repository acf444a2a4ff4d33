"""Rollouts, token by token, with a generator that says what it is told to.

Legends show each trajectory's tokens (the tiny model has one per character) and under them P for prompt, A for what
the policy wrote, E for what the environment said.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.metrics import values
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt, Sample, Samples, SamplingParams, Score, Step
from nemorl.weights import WeightHandle
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool, RewardFunction
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan, accuracy_of, rollout_metrics
from nemorl_rl.serving.generation_policy import GenerationPolicy
from nemorl_rl.serving.requests import TimedSample
from nemorl_tensors.numbers import token_ids
from recorded_messages import Raises


class Spoken:
    """A generation backend that answers with ``say(prompt text, number of the sample)``, letters worth -1, -2, … nats.

    ``|`` in a text stands for the end-of-sequence token; a text without it was cut by the limit.
    """

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str, int], str]) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.asked: list[list[GenerationRequest]] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        self.asked.append(list(requests))
        return [[self._one(request, number) for number in range(len(request.seeds))] for request in requests]

    def update_weights(self, handle: WeightHandle, version: int) -> None: ...

    def shutdown(self) -> None: ...

    def _one(self, request: GenerationRequest, number: int) -> Completion:
        text = self.say(self.tokenizer.decode(request.token_ids), number)
        (eos,) = self.tokenizer.stop_token_ids
        ids = self.tokenizer.encode(text.rstrip("|")) + [eos] * text.endswith("|")
        ids = ids[: request.sampling.max_new_tokens]
        finished = bool(ids) and ids[-1] == eos
        return Completion(
            tuple(ids), tuple(-float(n) for n in range(1, len(ids) + 1)), "stop" if finished else "length", (7,)
        )


class Dialogue(Environment):
    """Answers each response with the next line; the last response ends it. Reward 1 per turn, right if it says 9."""

    name = "dialogue"

    def __init__(self, *lines: str) -> None:
        self.lines = lines

    def start(self, prompt: Prompt) -> Any:
        return _Talk(list(self.lines))


class _Talk:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def step(self, response: str) -> Step:
        score = Score(1.0, {"talk": 0.5}, {"letters": float(len(response))}, correct=response == "9")
        return Step(score, self.lines.pop(0), done=False) if self.lines else Step(score)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


Collect = Callable[..., tuple[list[Sample], Spoken]]


@pytest.fixture
def collect(tokenizer: Tokenizer) -> Collect:
    def run(
        texts: list[str],
        say: Callable[[str, int], str],
        environment: Any = None,
        *,
        limit: int = 64,
        group: int = 1,
        seed: int = 5,
        turns: int = 1,
        **sampling: Any,
    ) -> tuple[list[Sample], Spoken]:
        backend = Spoken(tokenizer, say)
        pool = EnvironmentPool(environment or RewardFunction(lambda prompt, response: float(len(response))))
        workers = LocalWorkerGroup(lambda _: backend, WorkerContext(), "spoken")
        engine = RolloutEngine(GenerationPolicy(workers), pool, tokenizer, max_sequence_tokens=limit)
        prompts = [Prompt(index, text, tuple(tokenizer.encode(text))) for index, text in enumerate(texts)]
        params = SamplingParams(**{"max_new_tokens": 32, **sampling})
        samples = engine.collect(prompts, RolloutPlan(group, params, turns), seed=seed)
        return list(samples), backend

    return run


def legend(sample: Sample, tokenizer: Tokenizer) -> tuple[str, str]:
    tokens = tokenizer.inner.convert_ids_to_tokens(list(sample.token_ids))
    letters = "".join("|" if token == "<eos>" else token for token in tokens)
    size = len(sample.prompt.token_ids)
    roles = "".join("A" if mine else "E" for mine in sample.response_mask[size:])
    assert not any(sample.response_mask[:size])
    return letters, "P" * size + roles


# One turn


def test_one_turn_token_by_token(collect: Collect, tokenizer: Tokenizer) -> None:
    (sample,), _ = collect(["1+1="], lambda prompt, number: "42|")
    assert legend(sample, tokenizer) == ("1+1=42|", "PPPPAAA")
    assert sample.generation_logprobs == (0, 0, 0, 0, -1, -2, -3)
    assert (sample.response, sample.reward, sample.finish_reason) == ("42", 2.0, "stop")
    assert (sample.turns, sample.weight_versions, sample.response_tokens, sample.truncated) == (1, (7,), 3, False)


def test_groups_are_contiguous_in_prompt_order_and_share_one_request(collect: Collect) -> None:
    samples, backend = collect(["1", "2"], lambda prompt, number: f"{prompt}{number}|", group=3)
    assert [sample.response for sample in samples] == ["10", "11", "12", "20", "21", "22"]
    assert [sample.prompt.index for sample in samples] == [0, 0, 0, 1, 1, 1]
    (requests,) = backend.asked
    assert [len(request.seeds) for request in requests] == [3, 3]


def test_equal_prompts_are_still_two_groups(collect: Collect) -> None:
    samples, backend = collect(["1", "1"], lambda prompt, number: "2|", group=2)
    assert [sample.prompt.index for sample in samples] == [0, 0, 1, 1]
    assert len(backend.asked[0]) == 2


def test_every_sample_of_every_call_has_its_own_seed(collect: Collect) -> None:
    def seeds(seed: int) -> list[int]:
        _, backend = collect(["1", "1"], lambda prompt, number: "2|", group=2, seed=seed)
        return [seed for request in backend.asked[0] for seed in request.seeds]

    assert len({*seeds(1), *seeds(2)}) == 8
    assert seeds(1) == seeds(1)


def test_a_response_is_cut_where_the_sequence_would_be_too_long(collect: Collect, tokenizer: Tokenizer) -> None:
    (sample,), backend = collect(["1+1="], lambda prompt, number: "123456|", limit=7)
    assert legend(sample, tokenizer) == ("1+1=123", "PPPPAAA")
    assert sample.truncated
    assert backend.asked[0][0].sampling.max_new_tokens == 3


def test_a_prompt_without_room_for_a_response_is_refused(collect: Collect, raises: Raises) -> None:
    with raises(DataError, 1, 12345, 5, "policy.max_sequence_tokens"):
        collect(["1", "12345"], lambda prompt, number: "2|", limit=5)


def test_an_empty_response_is_scored(collect: Collect, tokenizer: Tokenizer) -> None:
    (sample,), _ = collect(["1"], lambda prompt, number: "|")
    assert legend(sample, tokenizer) == ("1|", "PA")
    assert (sample.response, sample.reward) == ("", 0.0)


# Several turns


def counting(prompt: str, number: int) -> str:
    """Says how many letters it has seen."""
    return f"{len(prompt)}|"


def test_two_turns_token_by_token(collect: Collect, tokenizer: Tokenizer) -> None:
    (sample,), backend = collect(["ab"], counting, Dialogue("xyz"), turns=2)
    # The second answer sees what was sampled (2 letters, end token) and what was said: "ab" "2" "xyz" = 6 letters.
    assert legend(sample, tokenizer) == ("ab2|xyz6|", "PPAAEEEAA")
    assert sample.generation_logprobs == (0, 0, -1, -2, 0, 0, 0, -1, -2)
    assert (sample.turns, sample.response, sample.response_tokens) == (2, "6", 4)
    # What was sampled is what comes next, token for token.
    assert backend.asked[1][0].token_ids == sample.token_ids[:7]


def test_rewards_of_turns_add_up_and_the_last_says_what_is_right(collect: Collect) -> None:
    (sample,), _ = collect(["a"], counting, Dialogue("b", "cd", "efg"), turns=4)
    # Letters seen: a=1; a1b=3; a1b3cd=6; a1b3cd6efg=10.
    assert sample.reward == 4.0
    assert sample.score.components == {"talk": 2.0}
    assert sample.score.metrics == {"letters": 5.0}  # "1", "3", "6", "10"
    assert sample.score.correct is False
    (short,), _ = collect(["1234567"], counting, Dialogue("x"), turns=2)
    assert short.score.correct is True  # 7 + "7" + "x" = 9 letters


def test_episodes_end_each_at_their_own_time(collect: Collect) -> None:
    class Impatient(Dialogue):
        def start(self, prompt: Prompt) -> Any:
            return _Talk(["x"] * prompt.index)

    samples, backend = collect(["a", "b", "c"], counting, Impatient(), turns=5)
    assert [sample.turns for sample in samples] == [1, 2, 3]
    assert [len(requests) for requests in backend.asked] == [3, 2, 1]


def test_samples_of_a_group_part_ways(collect: Collect) -> None:
    samples, backend = collect(["a"], lambda prompt, number: f"{number}|", Dialogue("x"), group=2, turns=2)
    assert samples[0].token_ids[:2] != samples[1].token_ids[:2]
    assert [len(request.seeds) for request in backend.asked[0]] == [2]
    assert [len(request.seeds) for request in backend.asked[1]] == [1, 1]
    assert len({seed for requests in backend.asked for request in requests for seed in request.seeds}) == 4


def test_an_observation_that_nobody_will_answer_is_left_out(collect: Collect, tokenizer: Tokenizer) -> None:
    (sample,), _ = collect(["ab"], counting, Dialogue("xyz", "uvw"), turns=1)
    assert legend(sample, tokenizer) == ("ab2|", "PPAA")
    assert sample.turns == 1


@pytest.mark.parametrize(("limit", "letters"), [(7, "ab2|"), (8, "ab2|xyz6")])
def test_an_observation_that_leaves_no_room_ends_the_episode(
    collect: Collect, tokenizer: Tokenizer, limit: int, letters: str
) -> None:
    (sample,), _ = collect(["ab"], counting, Dialogue("xyz"), turns=2, limit=limit)
    assert legend(sample, tokenizer)[0] == letters


def test_an_observation_is_not_a_new_text_with_special_tokens(collect: Collect, tokenizer: Tokenizer) -> None:
    (sample,), _ = collect(["a"], counting, Dialogue("<user>"), turns=2)
    # The tokenizer knows <user> as one token; it is appended as the tokenizer reads it, and decoding does not show it.
    assert sample.response_mask == (False, True, True, False, True, True)


def test_turns_that_are_taken_together_have_times_of_their_own_one_after_the_other(collect: Collect) -> None:
    samples, _ = collect(["a", "b"], counting, Dialogue("x", "y"), turns=3)
    for sample in samples:
        assert isinstance(sample, TimedSample)
        moments = [moment for turn in sample.turn_spans for moment in turn.span]
        assert [sample.span.began_s, *moments, sample.span.ended_s] == sorted(moments + list(sample.span))
        mask = sample.response_mask
        ends = [place for place in range(1, len(mask)) if mask[place] != mask[place - 1]][1:]
        assert [turn.stop for turn in sample.turn_spans] == [*ends, len(mask)]


# Metrics


def test_rollout_metrics_by_hand(collect: Collect) -> None:
    # Responses "a" and end (2 tokens), "bb" cut (2 tokens of 2): rewards 1 and 2, prompts of 1 token.
    samples, _ = collect(["1", "2"], lambda prompt, number: "a|" if prompt == "1" else "bb", max_new_tokens=2)
    numbers = values(rollout_metrics(Samples(samples)))
    assert numbers == {
        "num_samples": 2.0,
        "reward": 1.5,
        "accuracy": 1.5,
        "mean_prompt_length": 1.0,
        "mean_gen_tokens_per_sample": 2.0,
        "max_gen_tokens_per_sample": 2,
        "mean_total_tokens_per_sample": 3.0,
        "num_valid_samples": 2.0,
        "total_num_tokens": 6.0,
        "natural_termination_rate": 0.5,
        "truncation_rate": 0.5,
        "avg_turns_per_sample": 1.0,
    }


def test_metrics_of_episodes_with_several_turns_combine_as_documented(collect: Collect) -> None:
    """The example of docs/metrics.md: rewards 0.2 and 1.0 in two turns, the second right; one wrong turn worth 0."""

    class TwoOrOne(Environment):
        def start(self, prompt: Prompt) -> Any:
            return Talk([0.2, 1.0] if prompt.text == "2" else [0.0])

    class Talk:
        def __init__(self, rewards: list[float]) -> None:
            self.rewards, self.is_long = rewards, len(rewards) > 1

        def step(self, response: str) -> Step:
            reward, is_last = self.rewards.pop(0), not self.rewards
            score = Score(reward, {"form": 1.0}, {"calls": 2.0}, correct=self.is_long and is_last)
            return Step(score) if is_last else Step(score, "x", done=False)

    samples, _ = collect(["2", "1"], lambda prompt, number: "a|", TwoOrOne(), turns=3)
    numbers = values(rollout_metrics(Samples(samples)))
    assert numbers["reward"] == 0.6  # (1.2 + 0) / 2 episodes
    assert numbers["accuracy"] == 0.5  # right by its last turn, wrong
    assert numbers["avg_turns_per_sample"] == 1.5  # (2 + 1) / 2
    assert numbers["reward/form"] == 1.5  # (1 + 1, 1)
    assert numbers["environment/calls"] == 3.0  # (2 + 2, 2)
    assert numbers["mean_prompt_length"] == 1.0
    assert numbers["mean_gen_tokens_per_sample"] == 3.0  # "a|a|" and "a|"
    assert numbers["mean_total_tokens_per_sample"] == 4.5  # "2a|xa|" and "1a|"


def test_parts_and_metrics_of_environments_are_averaged_over_all_samples(collect: Collect) -> None:
    def grade(prompt: str, response: str) -> Score:
        return Score(1.0, {"format": 1.0}, {"odd": 1.0}, correct=False) if prompt == "1" else Score(1.0, correct=True)

    samples, _ = collect(["1", "2"], lambda prompt, number: "a|", RewardFunction(grade))
    numbers = values(rollout_metrics(Samples(samples)))
    assert numbers["reward/format"] == 0.5
    assert numbers["environment/odd"] == 0.5
    assert numbers["accuracy"] == 0.5
    assert numbers["reward"] == 1.0


@pytest.mark.parametrize(
    ("score", "accuracy"), [(Score(0.3), 0.3), (Score(-1, correct=True), 1.0), (Score(9, correct=False), 0.0)]
)
def test_accuracy_is_correctness_where_there_is_any(score: Score, accuracy: float, collect: Collect) -> None:
    (sample,), _ = collect(["1"], lambda prompt, number: "a|", RewardFunction(lambda prompt, response: score))
    assert accuracy_of(sample) == accuracy


class InArrays(Spoken):
    """Answers as engines do, in arrays, which it watches."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, lambda prompt, number: f"{prompt}|")
        self.arrays: list[weakref.ref[Any]] = []

    def _one(self, request: GenerationRequest, number: int) -> Completion:
        found = super()._one(request, number)
        ids = token_ids(found.token_ids)
        self.arrays.append(weakref.ref(ids.array))
        return replace(found, token_ids=ids.declared)


def test_what_an_engine_sent_is_let_go_when_its_sample_is_made(tokenizer: Tokenizer) -> None:
    backend = InArrays(tokenizer)
    pool = EnvironmentPool(RewardFunction(lambda prompt, response: 1.0))
    workers = LocalWorkerGroup(lambda _: backend, WorkerContext(), "spoken")
    engine = RolloutEngine(GenerationPolicy(workers), pool, tokenizer, max_sequence_tokens=64)
    prompts = [Prompt(index, text, tuple(tokenizer.encode(text))) for index, text in enumerate("123")]
    groups = engine.stream(prompts, RolloutPlan(1, SamplingParams(max_new_tokens=8)), seed=5)
    for left in (2, 1, 0):
        next(groups)
        assert sum(array() is not None for array in backend.arrays) == left


# The policy over several replicas


class Replicas:
    """A worker group of three generators, in one process."""

    data_parallel_size = 3

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.workers = [Spoken(tokenizer, lambda prompt, number: f"{prompt}|") for _ in range(3)]

    def scatter(self, verb: Callable[..., Any], shards: Sequence[Any]) -> list[Any]:
        return [getattr(worker, verb.__name__)(shard) for worker, shard in zip(self.workers, shards, strict=True)]

    def call(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(worker, verb.__name__)(*args, **kwargs) for worker in self.workers]

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_requests_spread_over_replicas_come_back_in_order(tokenizer: Tokenizer, count: int) -> None:
    replicas = Replicas(tokenizer)
    texts = [str(number) for number in range(count)]
    requests = [GenerationRequest(tuple(tokenizer.encode(text)), SamplingParams()) for text in texts]
    found = GenerationPolicy(replicas).generate(requests)
    assert [tokenizer.decode(group[0].token_ids) for group in found] == texts
    loads = [sum(map(len, worker.asked)) for worker in replicas.workers]
    assert max(loads) - min(loads) <= 1
