"""An agent with a tool, through the engine of rollouts: what is trained is what was sampled."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import pytest
from chat_models import ADD, Engine, template, tokenizer_of
from nemorl.contracts.environment import Environment
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt, Sample, SamplingParams
from nemorl_rl.agents.contract import CallOptions, EpisodePolicy
from nemorl_rl.environments import EnvironmentPool
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests

CALL = '<think>\nadd them\n</think>\n\nSum.\n<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'


class Scripted:
    """Says one text after another, letter by letter."""

    def __init__(self, engine: Engine, texts: list[str]) -> None:
        self.engine, self.texts = engine, texts
        self.said: list[tuple[int, ...]] = []

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        ids = (*self.engine.ids(self.texts[len(self.said)]), self.engine.tokenizer.inner.eos_token_id)
        self.said.append(ids)
        answer: Future[list[Completion]] = Future()
        answer.set_result([Completion(ids, (-0.5,) * len(ids), "stop", (1,))])
        return answer

    def shutdown(self) -> None: ...


class Adder(Environment):
    """Forgets reasoning, spells arguments anew, and starts over once."""

    name = "adder"

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> float:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        for turn in range(4):
            reply = await policy.chat(messages, tools=[ADD], tool_choice="required", options=CallOptions())
            calls = reply.message.get("tool_calls")
            if not calls:
                return float("3" in reply.text)
            [call] = calls
            arguments = json.loads(call["function"]["arguments"])
            echo = {**call, "function": {"name": "add", "arguments": json.dumps(arguments, sort_keys=True)}}
            result = {"role": "tool", "tool_call_id": call["id"], "content": str(sum(arguments.values()))}
            messages += [{"role": "assistant", "content": "Sum.", "tool_calls": [echo]}, result]
            if turn == 1:
                messages = [{"role": "user", "content": "Summary."}, *messages[-2:]]
        return 0.0


@pytest.fixture(params=[None, "qwen3"])
def world(request: pytest.FixtureRequest) -> tuple[Sample, Scripted, Engine]:
    if request.param is not None:
        pytest.importorskip("renderers", reason="pip install 'nemorl-rl[agents]'")
    engine = Engine(tokenizer_of(template("qwen3"), "<|endoftext|>"))
    scripted = Scripted(engine, [CALL, CALL, "It is 3.\n<tool_call>\n{}\n</tool_call>"])
    workers = LocalWorkerGroup(lambda _: NamedRequests(scripted), WorkerContext(), "scripted")  # type: ignore[arg-type]
    policy = GenerationPolicy(workers, single_requests=RequestLimits(4, 60.0))
    pool = EnvironmentPool(Adder(), chat_renderer=request.param)
    rollouts = RolloutEngine(policy, pool, engine.tokenizer, max_sequence_tokens=4096)
    prompt = Prompt(0, "1 + 2?", tuple(engine.tokenizer.encode("1 + 2?")))
    try:
        [sample] = rollouts.collect([prompt], RolloutPlan(1, SamplingParams(max_new_tokens=512)), seed=5)
    finally:
        policy.shutdown()
        pool.close()
    return sample, scripted, engine


def test_an_agent_s_sampled_tokens_are_trained_as_they_were_sampled(world: tuple[Sample, Scripted, Engine]) -> None:
    sample, scripted, engine = world
    trained = [
        tuple(token for token, chosen in zip(part.token_ids, part.response_mask, strict=True) if chosen)
        for part in sample.sequences
    ]
    assert trained == [scripted.said[0] + scripted.said[1], scripted.said[2]]
    assert sample.reward == 1.0
    summary = engine.text(sample.sequences[1].token_ids)
    assert summary.startswith("<|im_start|>system\n# Tools")
    assert "Summary.<|im_end|>\n<|im_start|>assistant\n<think>\nadd them" in summary


def test_what_went_wrong_is_counted(world: tuple[Sample, Scripted, Engine]) -> None:
    metrics = world[0].score.metrics
    assert metrics["sequences"] == 2.0
    assert metrics["realigned_tokens"] == 0.0
    assert metrics["malformed_tool_calls"] == 1.0
    assert metrics["broken_tool_choices"] == 1.0, "the last answer called none, though one was required"
