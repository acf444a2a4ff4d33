"""Episodes that their environment drives, token by token, with an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.base.process.timing import Span
from nemorl.contracts import Episode
from nemorl.contracts.environment import Environment
from nemorl.errors import DeadlineError, ForeignError, UsageError
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Prompt, Sample, Samples, SamplingParams, Score, Step
from nemorl_rl.agents import driver
from nemorl_rl.agents.contract import (
    CallOptions,
    ConstraintError,
    ContextOverflowError,
    EpisodeClosedError,
    EpisodePolicy,
)
from nemorl_rl.agents.record import Call, sequences, to_sample
from nemorl_rl.agents.turns import FreeTurns
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool, WeightedEnvironment
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.serving.generation_policy import GenerationPolicy, RequestLimits
from nemorl_rl.serving.requests import NamedRequests, TimedSample
from nemorl_tensors import TokenBatch
from recorded_messages import Raises
from scripted_policy import ScriptedPolicy

NO_TIME = Span(0.0, 0.0)
Rollout = Callable[[Prompt, EpisodePolicy], Awaitable[float | Score | None]]


class Speaker:
    """Answers ``say(text of the prompt)``, each letter worth -1 nat; ``|`` stands for the end-of-sequence token."""

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str], str]) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.asked: list[GenerationRequest] = []
        self.unanswered: list[Future[list[Completion]]] = []

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        self.asked.append(request)
        answer: Future[list[Completion]] = Future()
        text = self.say(self.tokenizer.decode(request.token_ids))
        if text == "never":
            self.unanswered.append(answer)
            return answer
        (eos,) = self.tokenizer.stop_token_ids
        ids = (self.tokenizer.encode(text.rstrip("|")) + [eos] * text.endswith("|"))[: request.sampling.max_new_tokens]
        reason = "stop" if ids and ids[-1] == eos else "length"
        answer.set_result([Completion(tuple(ids), (-1.0,) * len(ids), reason, (7,))])  # type: ignore[arg-type]
        return answer

    def shutdown(self) -> None: ...


class Agent(Environment):
    name = "agent"

    def __init__(self, play: Rollout) -> None:
        self.play = play

    async def rollout(self, prompt: Prompt, policy: EpisodePolicy) -> float | Score | None:
        return await self.play(prompt, policy)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


Collect = Callable[..., tuple[list[Sample], Speaker]]


@pytest.fixture
def collect(tokenizer: Tokenizer) -> Collect:
    def run(
        play: Rollout,
        say: Callable[[str], str] = lambda prompt: "42|",
        *,
        texts: Sequence[str] = ("1+1=",),
        limit: int = 64,
        group: int = 1,
        constrains: bool = False,
        **limits: Any,
    ) -> tuple[list[Sample], Speaker]:
        speaker = Speaker(tokenizer, say)
        pool = EnvironmentPool(Agent(play), **{"episode_timeout_s": 60.0, **limits})
        workers = LocalWorkerGroup(lambda _: NamedRequests(speaker), WorkerContext(), "speaker")  # type: ignore[arg-type]
        policy = GenerationPolicy(workers, single_requests=RequestLimits(64, 60.0), constrains=constrains)
        engine = RolloutEngine(policy, pool, tokenizer, max_sequence_tokens=limit)
        prompts = [Prompt(index, text, tuple(tokenizer.encode(text))) for index, text in enumerate(texts)]
        try:
            return list(engine.collect(prompts, RolloutPlan(group, SamplingParams(max_new_tokens=32)), seed=5)), speaker
        finally:
            policy.shutdown()
            pool.close()

    return run


def legend(sample: Sample, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Of each token sequence: its letters, and A where the policy chose them."""
    found = []
    for part in sample.sequences:
        tokens = tokenizer.inner.convert_ids_to_tokens(list(part.token_ids))
        letters = "".join("|" if token == "<eos>" else token for token in tokens)
        found.append((letters, "".join("A" if chosen else "." for chosen in part.response_mask)))
    return found


# What becomes of calls


def test_calls_that_go_on_from_each_other_are_one_sequence(collect: Collect, tokenizer: Tokenizer) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        first = await policy.complete(prompt.token_ids)
        told = (*prompt.token_ids, *first.token_ids, *tokenizer.encode("+1="))
        await policy.complete(told)
        return 1.0

    [sample], _ = collect(play, lambda prompt: "3|" if prompt.endswith("+1=") and len(prompt) > 4 else "42|")
    assert legend(sample, tokenizer) == [("1+1=42|+1=3|", "....AAA...AA")]
    assert (sample.reward, sample.turns, sample.finish_reason, sample.response) == (1.0, 2, "stop", "3")
    assert sample.generation_logprobs == (0, 0, 0, 0, -1, -1, -1, 0, 0, 0, -1, -1)
    assert sample.weight_versions == (7,)
    assert dict(sample.score.metrics) == {
        "calls": 2.0,
        "sequences": 1.0,
        "delivered_tokens": 5.0,
        "dropped_tokens": 0.0,
        "forked_tokens": 0.0,
        "realigned_tokens": 0.0,
        "malformed_tool_calls": 0.0,
        "constrained_tokens": 0.0,
        "broken_tool_choices": 0.0,
    }


def test_a_fork_trains_what_came_before_it_once(collect: Collect, tokenizer: Tokenizer) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        first = await policy.complete(prompt.token_ids)
        told = (*prompt.token_ids, *first.token_ids)
        await policy.complete((*told, *tokenizer.encode("+")))
        await policy.complete((*told, *tokenizer.encode("-")))
        return 0.5

    [sample], _ = collect(play, lambda prompt: {"+": "8|", "-": "9|"}.get(prompt[-1], "42|"))
    assert legend(sample, tokenizer) == [("1+1=42|+8|", "....AAA.AA"), ("1+1=42|-9|", "........AA")]
    assert sample.response_tokens == 7
    assert sample.score.metrics["forked_tokens"] == 3, "42| is the context of 9|"


def test_a_sub_agent_is_a_sequence_of_its_own(collect: Collect, tokenizer: Tokenizer) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        await asyncio.gather(policy.complete(prompt.token_ids), policy.complete(tokenizer.encode("5-2=")))
        return 0.5

    [sample], _ = collect(play)
    assert legend(sample, tokenizer) == [("1+1=42|", "....AAA"), ("5-2=42|", "....AAA")]


def test_an_episode_without_a_call_keeps_its_place_and_trains_nothing(collect: Collect) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        return 1.0

    samples, _ = collect(play, texts=["1", "2"], group=2)
    assert [(sample.prompt.index, sample.reward, sample.response_tokens) for sample in samples] == [
        (0, 1.0, 0),
        (0, 1.0, 0),
        (1, 1.0, 0),
        (1, 1.0, 0),
    ]


def test_seeds_differ_by_episode_and_call_and_are_those_of_the_run(collect: Collect) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        await policy.complete(prompt.token_ids)
        await policy.complete(prompt.token_ids)
        return 0.0

    seeds = [request.seeds for request in collect(play, group=2)[1].asked]
    assert len(set(seeds)) == 4
    assert sorted(seeds) == sorted(request.seeds for request in collect(play, group=2)[1].asked)


def test_between_two_answers_of_a_sequence_the_environment_has_its_turn() -> None:
    # Asked at 10, answered from 11 to 13; asked on at 16, answered from 17 to 18; a fork asked at 14.
    first = Call(0, (1,), Completion((2,), (-0.1,), "stop"), asked_s=10.0, span=Span(11.0, 13.0))
    onward = Call(1, (1, 2, 3), Completion((4,), (-0.2,), "stop"), asked_s=16.0, span=Span(17.0, 18.0))
    fork = Call(2, (7, 8), Completion((9,), (-0.3,), "stop"), asked_s=14.0, span=Span(14.0, 15.0))
    prompt, whole = Prompt(0, "p", (1,)), Span(9.0, 20.0)
    made = to_sample(prompt, [first, onward, fork], Score(1.0), "", version=0, span=whole)
    assert isinstance(made, TimedSample)
    assert made.span == whole
    assert made.turn_spans == (
        (0, 2, (11.0, 13.0)), (0, 3, (13.0, 16.0)), (0, 4, (17.0, 18.0)), (1, 3, (14.0, 15.0))
    )  # fmt: skip


@pytest.mark.parametrize("trial", range(20))
def test_every_sampled_token_is_trained_once_however_calls_branch(trial: int) -> None:
    choose = random.Random(trial)
    calls: list[Call] = []
    for number in range(choose.randint(1, 12)):
        before = choose.choice(calls) if calls and choose.random() < 0.8 else None
        known = (*before.prompt_ids, *before.completion.token_ids) if before else ()
        prompt = (*known[: choose.randint(0, len(known))], *(choose.randint(0, 3) for _ in range(choose.randint(0, 3))))
        answer = tuple(1000 * (number + 1) + place for place in range(choose.randint(1, 4)))  # each token is unique
        calls.append(Call(number, prompt, Completion(answer, (-1.0,) * len(answer), "stop")))
    branches = sequences(calls)
    trained = [
        token
        for branch in branches
        for token, chosen in zip(branch.token_ids, branch.response_mask, strict=True)
        if chosen
    ]
    assert sorted(trained) == sorted(token for call in calls for token in call.completion.token_ids)
    for call in calls:  # each answer stands after exactly its prompt, in some sequence
        whole = (*call.prompt_ids, *call.completion.token_ids)
        assert any(branch.token_ids[: len(whole)] == whole for branch in branches)


# The weight of an episode


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum"])
def test_an_episode_in_three_sequences_trains_as_one(aggregation: Any) -> None:
    """Three answers of 2, 1 and 3 tokens: as one conversation, and as three that share nothing; beside another episode.

    By hand, for ``sequence``: 2 episodes, 6 tokens in the first, so each of its tokens weighs 1/12; the other one's
    token 1/2. Whatever the policy thinks of the tokens, the loss is the same.
    """
    prompt, other = Prompt(0, "x", (1,)), Prompt(0, "x", (1,))
    answers = [(11, 12), (13,), (14, 15, 16)]
    sampled = [Completion(ids, (-1.0,) * len(ids), "stop") for ids in answers]
    told: tuple[int, ...] = (1,)
    chain = []
    for number, completion in enumerate(sampled):
        chain.append(Call(number, told, completion))
        told = (*told, *completion.token_ids, 2)
    apart = [Call(number, (3 + number, 9), completion) for number, completion in enumerate(sampled)]
    lone = to_sample(
        other, [Call(0, (1,), Completion((17,), (-1.0,), "stop"))], Score(0.0), "", version=0, span=NO_TIME
    )
    losses = []
    for calls, count in ((chain, 2), (apart, 4)):
        one = to_sample(prompt, calls, Score(1.0), "", version=0, span=NO_TIME)
        batch = TokenBatch.from_samples(Samples([one, lone]), [0.5, -0.25], loss_aggregation=aggregation)
        assert len(batch) == count
        thought = {11: -0.9, 12: -1.1, 13: -1.3, 14: -0.2, 15: -1.0, 16: -2.0, 17: -0.7}
        policy = torch.tensor([thought.get(token, 0.0) for token in batch.token_ids.tolist()], requires_grad=True)
        loss, _ = ClippedPolicyGradientLoss(on_policy=True)(policy, batch)
        loss.backward()
        assert policy.grad is not None
        losses.append((float(loss.detach()), sorted(policy.grad[batch.mask].tolist())))
        if aggregation == "sequence":
            of_first = batch.mask & (batch.episodes[batch.sequence_ids] == 0)
            assert batch.loss_weights[of_first].tolist() == pytest.approx([1 / 12] * 6)
            assert float(batch.loss_weights[batch.mask][-1]) == 0.5
    assert losses[0][0] == pytest.approx(losses[1][0])
    assert losses[0][1] == pytest.approx(losses[1][1])


def test_minibatches_keep_episodes_whole() -> None:
    def episode(index: int, parts: int) -> Sample:
        calls = [Call(n, (index, n), Completion((50 + n,), (-1.0,), "stop")) for n in range(parts)]
        return to_sample(Prompt(index, "x", (1,)), calls, Score(1.0), "", version=0, span=NO_TIME)

    batch = TokenBatch.from_samples(Samples([episode(0, 3), episode(1, 1), episode(2, 2), episode(3, 1)]), [1.0] * 4)
    first, second = batch.minibatches(2)
    assert (first.episodes.tolist(), second.episodes.tolist()) == ([0, 0, 0, 1], [2, 2, 3])
    assert float(first.loss_weights.sum()) == float(second.loss_weights.sum()) == pytest.approx(1.0)


# Limits


def test_what_an_episode_may_not_do_ends_it_with_zero(collect: Collect) -> None:
    async def chatter(prompt: Prompt, policy: EpisodePolicy) -> float:
        while True:
            await policy.complete(prompt.token_ids)

    [sample], speaker = collect(chatter, max_calls=3)
    assert (sample.reward, sample.turns, len(speaker.asked)) == (0.0, 3, 3)
    assert sample.score.metrics["ended_by_CallLimitError"] == 1.0

    async def rambler(prompt: Prompt, policy: EpisodePolicy) -> float:
        with pytest.raises(ContextOverflowError) as caught:
            await policy.complete((5,) * 70)
        assert (caught.value.prompt_tokens, caught.value.limit) == (70, 64)
        await policy.complete((5,) * 64)
        return 1.0

    [sample], _ = collect(rambler)
    assert (sample.reward, sample.turns, sample.score.metrics["ended_by_ContextOverflowError"]) == (0.0, 0, 1.0)


def test_an_answer_has_the_room_that_is_left_and_what_the_call_asks_for(collect: Collect) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        await policy.complete((5,) * 60)
        await policy.complete((5,) * 4, options=CallOptions(max_new_tokens=2, stop=("x",), temperature=0.3))
        return 1.0

    _, speaker = collect(play)
    assert [request.sampling.max_new_tokens for request in speaker.asked] == [4, 2]
    assert speaker.asked[1].sampling.stop_strings == ("x",)
    assert speaker.asked[1].sampling.temperature == 1.0, "log-probs are trained at the run's temperature"


def test_an_episode_that_takes_too_long_is_cancelled_and_the_others_go_on(collect: Collect) -> None:
    cancelled: list[int] = []

    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        if prompt.index == 0:
            try:
                await policy.complete(prompt.token_ids)
            except asyncio.CancelledError:
                cancelled.append(prompt.index)
                raise
        return 1.0

    samples, speaker = collect(play, lambda text: "never", texts=["1", "2"], episode_timeout_s=0.2)
    assert [(sample.reward, sample.score.metrics.get("episode_timeout")) for sample in samples] == [
        (0.0, 1.0),
        (1.0, None),
    ]
    assert cancelled == [0]
    assert speaker.unanswered[0].cancelled(), "the engine goes on sampling for nobody"


def test_an_episode_that_does_not_end_when_it_is_cancelled_is_left_behind(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "GRACE_S", 0.2)

    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            try:
                await asyncio.sleep(2.0)
            except asyncio.CancelledError:
                continue
        return 1.0

    [sample], _ = collect(play, episode_timeout_s=0.1)
    assert (sample.reward, sample.score.metrics["episode_timeout"]) == (0.0, 1.0)


def test_episodes_that_hold_all_slots_for_ever_take_those_that_wait_for_one_with_them(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "GRACE_S", 1.0)
    began: list[int] = []
    free = threading.Event()

    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        began.append(prompt.index)
        while not free.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return 1.0

    try:
        samples, _ = collect(play, texts=["1", "2"], episode_timeout_s=0.1, concurrency=1)
    finally:
        free.set()
    assert [(sample.reward, sample.score.metrics["episode_timeout"]) for sample in samples] == [(0.0, 1.0)] * 2
    assert began == [0]


def test_blocking_the_event_loop_is_an_error_that_says_so(
    collect: Collect, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr(driver, "GRACE_S", 0.2)
    free = threading.Event()

    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        free.wait(60.0)
        return 1.0

    try:
        with raises(DeadlineError, "agent", "asyncio.to_thread"):
            collect(play, texts=["1", "2"], episode_timeout_s=0.3, concurrency=1)
    finally:
        free.set()


def test_calls_after_the_end_are_refused(collect: Collect) -> None:
    kept: list[EpisodePolicy] = []

    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        kept.append(policy)
        return 1.0

    collect(play)
    with pytest.raises(EpisodeClosedError):
        asyncio.run(kept[0].complete((5,)))


def test_no_more_episodes_at_once_than_allowed_and_none_waits_for_anothers_turn(collect: Collect) -> None:
    at_once, most = 0, 0
    others_done = asyncio.Event()
    ended = 0

    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        nonlocal at_once, most, ended
        at_once += 1
        most = max(most, at_once)
        if prompt.index == 0:
            await others_done.wait()  # five episodes of three turns pass it by
        else:
            for _ in range(3):
                await policy.complete(prompt.token_ids)
                await asyncio.sleep(0)
            ended += 1
            if ended == 5:
                others_done.set()
        at_once -= 1
        return float(prompt.index)

    samples, _ = collect(play, texts=["1"] * 6, concurrency=2)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert most == 2


# Mistakes


def test_an_error_of_the_environment_stops_the_run_with_its_name(collect: Collect, raises: Raises) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        raise KeyError("tool")

    with raises(ForeignError, "agent", "KeyError"):
        collect(play)


def test_a_time_out_of_the_environments_own_is_no_verdict_on_the_policy(collect: Collect) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        raise TimeoutError("the database")

    samples, _ = collect(play)
    scores = [sample.score for sample in samples]
    assert {(score.valid, score.outcome) for score in scores} == {(False, "infrastructure")}
    assert {score.cause for score in scores} == {"episode: TimeoutError: the database"}


def test_an_agent_that_asks_python_to_end_does_not_end_the_run_as_if_a_person_had(
    collect: Collect, raises: Raises
) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        raise SystemExit(3)

    with raises(ForeignError, "SystemExit"):
        collect(play)


@pytest.mark.parametrize("result", ["1.0", float("nan"), [float("inf"), 1.0]])
def test_a_reward_that_is_no_number_is_an_error(collect: Collect, result: Any) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> Any:
        return result

    with pytest.raises((UsageError, ForeignError)):
        collect(play)


def test_nobody_can_say(collect: Collect) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> None:
        await policy.complete(prompt.token_ids)

    [sample], _ = collect(play)
    assert not sample.score.valid


def test_an_agent_is_no_part_of_a_sum(raises: Raises) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> float:
        return 1.0

    with raises(UsageError, "first"):
        WeightedEnvironment({"first": Agent(play)})


# Conversations at their own pace


class Talk:
    """Answers each response with a line, the last with the end; a turn earns 1 for each of its number's places."""

    def __init__(self) -> None:
        self.lines, self.turn = ["+1=", "-1="], 0

    def step(self, response: str) -> Step:
        self.turn += 1
        score = Score(float(self.turn), {"talk": 0.5}, correct=response == "9")
        return Step(score, self.lines.pop(0), done=False) if self.lines else Step(score)


class Dialogue(Environment):
    name = "dialogue"

    def start(self, prompt: Prompt) -> Episode:
        return Talk()


def both_ways(tokenizer: Tokenizer, environment: Environment, **options: Any) -> list[list[Sample]]:
    """The same rollout with turns taken together, and each episode at its own pace."""

    class Both(Speaker):
        def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
            return [
                [self.submit(replace(request, seeds=(seed,))).result()[0] for seed in request.seeds]
                for request in requests
            ]

    found = []
    for turns in ("together", "free"):
        speaker = Both(tokenizer, lambda prompt: "9|" if prompt.endswith("-1=") else str(len(prompt) % 10) + "|")
        workers = LocalWorkerGroup(lambda _, it=speaker: NamedRequests(it), WorkerContext(), "speaker")  # type: ignore[misc, arg-type]
        policy = GenerationPolicy(workers, single_requests=RequestLimits(64, 60.0))
        pool = EnvironmentPool(environment, turns=turns, **options)  # type: ignore[arg-type]
        engine = RolloutEngine(policy, pool, tokenizer, max_sequence_tokens=40)
        prompts = [Prompt(index, text, tuple(tokenizer.encode(text))) for index, text in enumerate(["1+1=", "2="])]
        plan = RolloutPlan(2, SamplingParams(max_new_tokens=8), max_turns=3)
        found.append(list(engine.collect(prompts, plan, seed=5)))
        policy.shutdown()
        pool.close()
    return found


def test_free_turns_say_what_turns_together_say(tokenizer: Tokenizer) -> None:
    together, free = both_ways(tokenizer, Dialogue())
    without = [replace(s, score=replace(s.score, metrics={}, turn_rewards=())) for s in free]
    assert without == [replace(sample, score=replace(sample.score, metrics={})) for sample in together]
    assert free[0].turn_rewards == ((5, 1.0), (10, 2.0), (15, 3.0))
    assert (free[0].reward, free[0].score.correct, free[0].turns) == (6.0, True, 3)


def test_free_turns_keep_to_the_time_of_an_answer(tokenizer: Tokenizer) -> None:
    class Slow(Environment):
        def score(self, prompt: Prompt, response: str) -> Any:
            async def later() -> float:
                await asyncio.sleep(60.0 if prompt.index else 0.0)
                return 1.0

            return later()

    for samples in both_ways(tokenizer, Slow(), timeout_s=0.3):
        assert [sample.reward for sample in samples] == [1.0, 1.0, 0.0, 0.0]
        assert samples[-1].score.metrics["environment_timeout"] == 1.0


def test_a_conversation_that_begins_slowly_holds_up_no_other(tokenizer: Tokenizer) -> None:
    both = threading.Barrier(2)

    class Meeting(Environment):
        def start(self, prompt: Prompt) -> Episode:
            both.wait(10.0)
            return super().start(prompt)

        def score(self, prompt: Prompt, response: str) -> float:
            return 1.0

    free, prompt = FreeTurns(Meeting(), tokenizer, max_turns=1, timeout_s=10.0), Prompt(0, "1+1=", (5, 6))

    async def play() -> list[Score]:
        return await asyncio.gather(*(free.rollout(prompt, ScriptedPolicy()) for _ in range(2)))

    assert [score.reward for score in asyncio.run(play())] == [1.0, 1.0]


# Rewards that are given while an episode runs


def test_a_reward_is_added_to_its_answer_and_to_the_episode(collect: Collect) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> Score:
        first = await policy.complete(prompt.token_ids)
        second = await policy.complete((*prompt.token_ids, *first.token_ids))
        other = await policy.complete(prompt.token_ids)  # a fork
        assert [policy.reward(0.5, second), policy.reward(0.25, second), policy.reward(-1.0)] == [0.5, 0.75, -1.0]
        assert other is not first
        return Score(2.0, turn_rewards=(2.0,))

    [sample], _ = collect(play)
    # Turns earn 2, 0.75 and -1. An answer is three tokens, "42|", after the four of the prompt.
    assert sample.reward == 1.75
    assert sample.score.turn_rewards == (2.0, 0.75, -1.0)
    assert sample.turn_rewards == ((6, 2.0), (9, 0.75))
    assert [branch.turn_rewards for branch in sample.branches] == [((6, -1.0),)]


def test_a_reward_of_no_answer_or_no_number_is_refused_and_one_after_the_end(collect: Collect, raises: Raises) -> None:
    kept: list[EpisodePolicy] = []

    async def play(prompt: Prompt, policy: EpisodePolicy) -> Score:
        kept.append(policy)
        with raises(UsageError):
            policy.reward(1.0)
        await policy.complete(prompt.token_ids)
        with raises(UsageError):
            policy.reward(1.0, Completion((7,), (-1.0,), "stop"))
        for value in (float("nan"), float("inf")):
            with pytest.raises(UsageError, match="finite"):
                policy.reward(value)
        return Score(1.0)

    [sample], _ = collect(play)
    assert (sample.reward, sample.turn_rewards) == (1.0, ())
    with pytest.raises(EpisodeClosedError):
        kept[0].reward(1.0)


def test_rewards_given_before_a_crash_stay() -> None:
    answer = Completion((7,), (-1.0,), "stop")
    calls = [Call(0, (5,), answer, reward=0.5), Call(1, (5, 7, 5), answer)]
    sample = to_sample(Prompt(0, "?", (5,)), calls, Score(-1.0, correct=False), "", version=0, span=NO_TIME)
    assert (sample.reward, sample.turn_rewards) == (-0.5, ((1, 0.5), (3, 0.0)))


# Answers within a schema


def test_a_constrained_answer_is_context_and_what_follows_it_trains(collect: Collect, tokenizer: Tokenizer) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> Score:
        within = CallOptions(json_schema='{"type": "object"}')
        first = await policy.complete(prompt.token_ids, options=within)
        await policy.complete((*prompt.token_ids, *first.token_ids))
        policy.reward(0.5, first)
        return Score(1.0)

    [sample], speaker = collect(play, constrains=True)
    assert [request.sampling.json_schema for request in speaker.asked] == ['{"type": "object"}', None]
    assert legend(sample, tokenizer) == [("1+1=42|42|", ".......AAA")]
    assert sample.generation_logprobs == (0.0,) * 7 + (-1.0,) * 3
    assert sample.score.metrics["constrained_tokens"] == 3.0
    assert sample.turn_rewards == ((6, 0.5), (9, 0.0))


def test_an_engine_that_cannot_constrain_says_what_would(collect: Collect, raises: Raises) -> None:
    async def play(prompt: Prompt, policy: EpisodePolicy) -> Score:
        with raises(ConstraintError):
            await policy.complete(prompt.token_ids, options=CallOptions(json_schema="{}"))
        return Score(1.0)

    [sample], speaker = collect(play)
    assert (speaker.asked, sample.turns) == ([], 0)
