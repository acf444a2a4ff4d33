"""Tasks without a first prompt: a row names a task, and the environment says the first word."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from nemorl.contracts import Episode
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt, Sample, SamplingParams, Score, Step
from nemorl_rl.agents.contract import EpisodePolicy
from nemorl_rl.data.prompt_check import prompt_problems
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.rollouts.prompts import to_prompt, to_prompts
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests
from nemorl_tensors import TokenBatch
from recorded_messages import Raises

ROWS = [{"prompt": [], "task": "7"}, {"prompt": [], "task": "none"}]


class Speaker:
    """Answers every request with the token that it is told."""

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        answer: Future[list[Completion]] = Future()
        answer.set_result([Completion((5,), (-1.0,), "stop")])
        return answer

    def shutdown(self) -> None: ...


class SpeaksFirst(Environment):
    name = "speaks_first"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> float:
        assert (prompt.text, prompt.token_ids, prompt.messages) == ("", (), ())
        if prompt.row["task"] == "none":
            return 0.25
        await policy.complete(self.tokenizer.encode(prompt.row["task"]))
        return 1.0


class Waits(Environment):
    name = "waits"

    def start(self, prompt: Prompt) -> Episode:
        raise AssertionError("nobody speaks first")

    def step(self, response: str) -> Step:
        return Step(Score(0.0))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


def collected(environment: Environment, tokenizer: Tokenizer, rows: int = 2, turns: str = "together") -> list[Sample]:
    workers = LocalWorkerGroup(lambda _: NamedRequests(Speaker()), WorkerContext(), "speaker")  # type: ignore[arg-type]
    policy = GenerationPolicy(workers, single_requests=RequestLimits(64, 60.0))
    pool = EnvironmentPool(environment, turns=turns)  # type: ignore[arg-type]
    engine = RolloutEngine(policy, pool, tokenizer, max_sequence_tokens=64)
    try:
        return list(engine.collect(to_prompts(ROWS[:rows], tokenizer), RolloutPlan(1, SamplingParams()), seed=1))
    finally:
        policy.shutdown()
        pool.close()


def test_an_environment_that_calls_the_policy_says_the_first_word(tokenizer: Tokenizer) -> None:
    assert list(prompt_problems(ROWS, tokenizer)) == []
    asked, silent = collected(SpeaksFirst(tokenizer), tokenizer)
    (seven,) = tokenizer.encode("7")
    assert (asked.token_ids, asked.response_mask, asked.reward) == ((seven, 5), (False, True), 1.0)
    # One that asked nothing keeps its place with a token that nobody learns from: no sequence is empty.
    assert (silent.token_ids, silent.response_mask, silent.reward) == ((0,), (False,), 0.25)
    batch = TokenBatch.from_samples([asked, silent], [1.0, -1.0])  # type: ignore[arg-type]
    assert batch.lengths.tolist() == [2, 1]


@pytest.mark.parametrize("turns", ["together", "free"])
def test_an_environment_that_waits_for_a_response_is_told(tokenizer: Tokenizer, turns: str, raises: Raises) -> None:
    with raises(DataError, "waits", 0):
        collected(Waits(), tokenizer, 1, turns)


def test_a_row_that_forgot_its_prompt_is_still_a_mistake(tokenizer: Tokenizer, raises: Raises) -> None:
    for row in ({"task": "7"}, {"prompt": "", "task": "7"}, {"prompt": None, "task": "7"}):
        with raises(DataError, "prompt"):
            to_prompt(row, 0, tokenizer)
