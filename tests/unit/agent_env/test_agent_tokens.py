"""The built-in loop over a real template and a real engine's contract: what is trained is what was sampled, once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from chat_models import TAGGED
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt, SamplingParams
from nemorl_agents.programs import AgentConfig
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool
from nemorl_rl.models.tiny import ALPHABET
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests
from nemorl_testing.models import tiny_model

CALL = '<tool_call>{"name":   "add", "arguments": {"a": 40,"b": 2}}</tool_call>'
"""As no template would write it."""


class Speaker:
    """An engine that answers ``say(prompt)``, each letter worth -1 nat, and ends."""

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str], str]) -> None:
        self._tokenizer, self._say = tokenizer, say

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        prompt = self._tokenizer.inner.decode(list(request.token_ids))
        ids = (*self._tokenizer.encode(self._say(prompt)), *self._tokenizer.stop_token_ids)
        answer: Future[list[Completion]] = Future()
        answer.set_result([Completion(ids, (-1.0,) * len(ids), "stop", (7,))])
        return answer

    def shutdown(self) -> None: ...


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model") / "tools"
    shutil.copytree(tiny_model(alphabet=ALPHABET + "{}_"), folder)
    (folder / "chat_template.jinja").write_text(TAGGED)
    return Tokenizer.load(str(folder))


def test_a_tool_call_and_its_answer_are_one_sequence_of_what_was_sampled(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def add(a: int, b: int):\n    return a + b\n")
    agent = AgentConfig(tools={"functions": [f"{tmp_path}/tools.py:add"]}, reward="exact_match").build()
    speaker = Speaker(tokenizer, lambda prompt: prompt.partition("<tool>")[2].partition("<")[0] or CALL)
    workers = LocalWorkerGroup(lambda _: NamedRequests(speaker), WorkerContext(), "speaker")  # type: ignore[arg-type]
    policy = GenerationPolicy(workers, single_requests=RequestLimits(64, 60.0))
    pool = EnvironmentPool(agent, episode_timeout_s=60.0)
    engine = RolloutEngine(policy, pool, tokenizer, max_sequence_tokens=512)
    messages = ({"role": "user", "content": "40+2="},)
    prompt = Prompt(0, "40+2=", tuple(tokenizer.encode_prompt(messages)), messages=messages, answer="42")
    try:
        [sample] = engine.collect([prompt], RolloutPlan(1, SamplingParams(max_new_tokens=128)), seed=5)
    finally:
        policy.shutdown()
        pool.close()
    assert (sample.reward, sample.turns, sample.response) == (1.0, 2, "42")
    assert sample.score.metrics["tool_calls"] == 1.0
    assert not sample.branches
    tokens = tokenizer.inner.convert_ids_to_tokens(list(sample.token_ids))
    trained = "".join(token for token, chosen in zip(tokens, sample.response_mask, strict=True) if chosen)
    context = "".join(token for token, chosen in zip(tokens, sample.response_mask, strict=True) if not chosen)
    assert trained == f"{CALL}<eos>42<eos>"
    assert context == "<system>add<user>40+2=<assistant><tool>42<assistant>"
