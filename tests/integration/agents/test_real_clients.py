"""Unmodified programs with the SDKs that agents are written with: what they train is exactly what the engine sampled.

The engine is scripted, and spells its words in other tokens than the tokenizer would: whatever is tokenised again is
seen. Each program solves one task with a tool.
"""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from chat_models import Engine, template, tokenizer_of
from nemorl.config.component import Component
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt, Sample, Samples, SamplingParams
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests
from nemorl_tensors import TokenBatch
from tiers import only

pytestmark = pytest.mark.slow

CLIENTS = Path(__file__).parent / "clients"
PROGRAMS = {
    "openai_json": "openai",
    "openai_sse": "openai",
    "agents_chat": "agents",
    "agents_responses": "agents",
    "pydantic_agent": "pydantic_ai",
    "langgraph_agent": "langgraph",
    "smolagents_agent": "smolagents",
    "anthropic_agent": "anthropic",
}
"""Program -> the module that it needs."""
REWRITES_HISTORY = {"smolagents_agent"}
TASK = "What is 17 + 25?"


class Calculator:
    """Calls the tool, then says what it answered; ``submit`` is all that it has of a generation backend."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.spelling = Engine(tokenizer)
        self.record: list[tuple[tuple[int, ...], Completion]] = []
        """What it was asked, and what it sampled"""

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        told = self.spelling.text(request.token_ids)
        [completion] = [self.spelling.say(None, self.answer_to(told))]  # type: ignore[arg-type]
        self.record.append((request.token_ids, completion))
        answer: Future[list[Completion]] = Future()
        answer.set_result([completion])
        return answer

    def answer_to(self, told: str) -> str:
        task = told.rpartition(TASK)[2]
        if "42" not in task:
            return 'Let me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 17,  "b": 25}}\n</tool_call>'
        if "final_answer" in told:
            return '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "42"}}\n</tool_call>'
        return "42"

    def shutdown(self) -> None: ...


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(template("qwen2_5"))


def episodes(program: str, tokenizer: Tokenizer, count: int) -> tuple[list[Sample], Calculator]:
    engine = Calculator(tokenizer)
    workers = LocalWorkerGroup(lambda _: NamedRequests(engine), WorkerContext(), "calculator")  # type: ignore[arg-type]
    policy = GenerationPolicy(workers, single_requests=RequestLimits(64, 120.0))
    options = {
        "name": "agent",
        "command": [sys.executable, str(CLIENTS / f"{program}.py"), "{prompt}"],
        "env": {"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        "reward": {"name": "exact_match"},
        "outcomes": {"crashed": "error"},
        "timeout_s": 240,
    }
    environment = Component("environments").resolve(options).build()  # type: ignore[attr-defined]
    pool = EnvironmentPool(environment, episode_timeout_s=300.0, concurrency=4)
    rollouts = RolloutEngine(policy, pool, tokenizer, max_sequence_tokens=20_000)
    try:
        prompt = Prompt(0, TASK, tuple(tokenizer.encode(TASK)), answer="42", row={"prompt": TASK, "answer": "42"})
        plan = RolloutPlan(count, SamplingParams(max_new_tokens=500))
        return list(rollouts.collect([prompt], plan, seed=3)), engine
    finally:
        policy.shutdown()
        pool.close()


@pytest.mark.parametrize("program", only("openai_sse", "anthropic_agent", of=PROGRAMS))
def test_trained_are_exactly_the_tokens_that_were_sampled(program: str, tokenizer: Tokenizer) -> None:
    if importlib.util.find_spec(PROGRAMS[program]) is None:
        pytest.skip(f"{PROGRAMS[program]} is not installed")
    samples, engine = episodes(program, tokenizer, 2)
    assert [sample.reward for sample in samples] == [1.0, 1.0], [sample.response for sample in samples]
    assert [sample.turns for sample in samples] == [2, 2]
    parts = Samples(samples).sequences
    trained = [t for part in parts for t, chosen in zip(part.token_ids, part.response_mask, strict=True) if chosen]
    assert sorted(trained) == sorted(t for _, completion in engine.record for t in completion.token_ids)
    for prompt_ids, completion in engine.record:  # every answer stands after the very tokens that it answered
        whole = (*prompt_ids, *completion.token_ids)
        assert any(part.token_ids[: len(whole)] == whole for part in parts)
    assert len(parts) == (4 if program in REWRITES_HISTORY else 2)
    weights = TokenBatch.from_samples(Samples(samples), [1.0, 1.0], loss_aggregation="sequence")
    of_episodes = torch.zeros(2).index_add_(0, weights.episodes[weights.sequence_ids], weights.loss_weights)
    assert of_episodes.tolist() == pytest.approx([0.5, 0.5], rel=1e-5)  # sums of float32
