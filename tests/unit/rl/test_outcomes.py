"""How episodes end, who caused it, and what is learnt from each end: by hand, for every estimator."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from nemorl.config.load import load_config
from nemorl.contracts.environment import Environment
from nemorl.errors import BackendError, ConfigError, ForeignError, InfrastructureError, WorkerHungError
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Branch, Completion, GenerationRequest, Outcome, Prompt, Sample, Samples, SamplingParams, Score
from nemorl.weights import WeightHandle
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool, RewardFunction, WeightedEnvironment
from nemorl_rl.environments.faults import failure
from nemorl_rl.evaluation.evaluation import errors_over_prompts, measure
from nemorl_rl.policy_gradient.advantages import over_valid
from nemorl_rl.policy_gradient.updates import transformed
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan, rollout_metrics
from nemorl_rl.rollouts.outcomes import OUTCOMES, OutcomeTable, outcome_metrics
from nemorl_rl.serving.generation_policy import GenerationPolicy
from recorded_messages import Raises

PROMPT = Prompt(0, "1+1=", (1, 2))


def ended(reward: float, outcome: Outcome = "scored", *, group: int = 0, valid: bool = True, **fields: Any) -> Sample:
    score = Score(reward, fields.pop("components", {}), valid=valid, outcome=outcome, **fields)
    tokens = (1, 2, 3)
    return Sample(Prompt(group, "?", (1,)), tokens, (False, True, True), (0.0, -1.0, -1.0), score, "23", "stop")


# The table


@pytest.mark.parametrize(
    ("fates", "expected"),
    [
        # Rewards 1 and -1 have verdicts; the lowest of the group is -1.
        ({}, [(1.0, True), (-1.0, True), (-1.0, True), (0.0, False), (0.0, False)]),
        ({"policy_timeout": -3.0}, [(1.0, True), (-1.0, True), (-3.0, True), (0.0, False), (0.0, False)]),
        ({"environment_timeout": 0.5}, [(1.0, True), (-1.0, True), (-1.0, True), (0.5, True), (0.0, False)]),
        ({"infrastructure": "refill"}, [(1.0, True), (-1.0, True), (-1.0, True), (0.0, False), (0.0, False)]),
    ],
)
def test_each_end_has_its_consequence(fates: dict[str, Any], expected: list[tuple[float, bool]]) -> None:
    group = [
        ended(1.0),
        ended(-1.0),
        ended(0.0, "policy_timeout"),
        ended(0.0, "environment_timeout", valid=False),
        ended(0.0, "infrastructure", valid=False),
    ]
    found = OutcomeTable(**fates).settled(group)
    assert [(one.reward, one.score.valid) for one in found] == expected


def test_the_lowest_reward_is_at_most_zero_so_that_stalling_never_pays() -> None:
    kind, harsh = [ended(0.2), ended(0.7), ended(0.5, "policy_timeout")], [ended(-2.0), ended(0.5, "policy_timeout")]
    assert [OutcomeTable().settled(group)[-1].reward for group in (kind, harsh)] == [0.0, -2.0]


def test_a_response_at_the_token_limit_is_one_and_keeps_what_it_was_given() -> None:
    cut = replace(ended(0.4), finish_reason="length")
    (kept,), (dropped,) = (OutcomeTable(truncated=fate).settled([cut]) for fate in ("partial", "drop"))
    assert (kept.reward, kept.score.valid, kept.score.outcome) == (0.4, True, "truncated")
    assert not dropped.score.valid


def test_a_fate_that_is_none_is_refused_with_the_choices(raises: Raises) -> None:
    with raises(ConfigError, "infrastructure", "drop"):
        load_config({"algorithm": "grpo", "model": "m", "rollouts": {"on_outcome": {"infrastructure": "ignore"}}})


# Who caused it


class RefusalError(Exception):
    """As clients of HTTP tell of an answer."""

    __module__ = "httpx"

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.response = type("Response", (), {"status_code": status})


class StatusError(Exception):
    """As aiohttp tells of an answer."""

    __module__ = "aiohttp"

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (ConnectionResetError("peer"), True),
        (TimeoutError("no answer"), True),
        (InfrastructureError("no sandbox is free"), True),
        (RefusalError(503), True),
        (RefusalError(429), True),
        (RefusalError(404), False),
        (HTTPError("http://judge", 503, "full", Message(), None), True),  # as urllib tells of an answer
        (HTTPError("http://judge", 404, "gone", Message(), None), False),
        (StatusError(502), True),
        (StatusError(401), False),
        (caused(ValueError("no JSON"), ConnectionError("cut off")), True),
        (caused(ForeignError("environment x raised"), ConnectionError("cut off")), True),
        (KeyError("answer"), False),
        (FileNotFoundError("tests.json"), False),
        (WorkerHungError("rank 1 is silent"), False),  # the run's own: it recovers its workers
        (caused(BackendError("the engine died"), ConnectionError("cut off")), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_failures_are_told_from_mistakes(error: Exception, is_failure: bool) -> None:
    score = failure(error, "reset")
    assert (score is not None) == is_failure
    if score is not None:
        assert (score.outcome, score.valid) == ("infrastructure", False)
        assert score.cause.startswith(f"reset: {type(error).__name__}: ")


class Sleeping(Environment):
    name = "sleeping"

    def score(self, prompt: Prompt, response: str) -> float:
        time.sleep(0.5)
        return 1.0


@pytest.mark.parametrize(("can_stall", "outcome"), [(True, "policy_timeout"), (False, "environment_timeout")])
def test_a_time_out_is_of_whoever_can_cause_it(can_stall: bool, outcome: str) -> None:
    environment = Sleeping()
    environment.policy_can_stall = can_stall
    pool = EnvironmentPool(environment, timeout_s=0.05)
    (step,) = pool.step([pool.start(PROMPT)], ["2"])
    assert (step.score.outcome, step.score.valid) == (outcome, can_stall)


def test_a_reset_that_fails_is_a_failed_episode() -> None:
    class Down(Environment):
        def start(self, prompt: Prompt) -> Any:
            raise ConnectionRefusedError("node3 refused")

    pool = EnvironmentPool(Down())
    (step,) = pool.step([pool.start(PROMPT)], ["2"])
    assert step.score.cause == "reset: ConnectionRefusedError: node3 refused"


def test_a_part_that_fails_is_the_end_of_the_whole() -> None:
    broken = Score(0.0, valid=False, outcome="infrastructure", cause="the judge is down")
    whole = WeightedEnvironment({"right": lambda p, r: 1.0, "style": lambda p, r: broken})
    pool = EnvironmentPool(whole)
    (step,) = pool.step([pool.start(PROMPT)], ["2"])
    assert (step.score.outcome, step.score.valid) == ("infrastructure", False)
    assert step.score.cause == "style: the judge is down"


# Estimators

ESTIMATORS: dict[str, tuple[dict[str, Any], list[float]]] = {
    # Two groups: rewards 1, 0, 0.5 and 0, 1 have verdicts; a failed episode stands in each, with a reward of 100.
    "grpo": ({}, [0.75 / 0.353554, -0.75 / 0.353554, 0.0, -1.0, 1.0]),
    "dr_grpo": ({}, [0.5, -0.5, 0.0, -0.5, 0.5]),
    "rloo": ({}, [0.75, -0.75, 0.0, -1.0, 1.0]),
    "reinforce_plus_plus_baseline": ({}, [1.118034, -1.118034, 0.0, -1.118034, 1.118034]),
    "maxrl": ({}, [1.0, -1.0, 0.0, -1.0, 1.0]),
}
"""Algorithm -> settings, advantages of the five by hand.

grpo leaves the response out: mean of 0 and 0.5 is 0.25, their deviation 0.353553, plus 1e-6. dr_grpo: less the mean.
rloo: less the mean of the others. reinforce_plus_plus_baseline: means 0.5, deviations from it 0.5, 0.5, 0, 0.5, 0.5,
their standard deviation sqrt(1 / 5) = 0.447214. maxrl: divided by the mean."""


def mixed() -> Samples:
    first = [ended(1.0), ended(100.0, "infrastructure", valid=False), ended(0.0), ended(0.5)]
    second = [ended(0.0, group=1), ended(1.0, group=1), ended(100.0, "environment_timeout", group=1, valid=False)]
    return Samples([*first, *second])


@pytest.mark.parametrize("algorithm", ESTIMATORS)
def test_failures_are_in_no_baseline_spread_or_mean(algorithm: str) -> None:
    settings, expected = ESTIMATORS[algorithm]
    trainer = load_config({"algorithm": algorithm, "model": "m", **settings}).build()
    found = over_valid(mixed(), trainer.compute_advantages)
    judged = [value for value, sample in zip(found, mixed(), strict=True) if sample.score.valid]
    assert judged == pytest.approx(expected, abs=2e-5)
    assert [found[1], found[6]] == [0.0, 0.0]
    assert trainer.dropped(mixed()) == [False, True, False, False, False, False, True]


@pytest.mark.parametrize("algorithm", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo"])
def test_failures_are_in_no_spread_of_tokens(algorithm: str) -> None:
    trainer = load_config({"algorithm": algorithm, "model": "m"}).build()
    trainer.setup()

    def credit(samples: Samples) -> Any:
        batch = trainer.to_batch(samples, over_valid(samples, trainer.compute_advantages))
        zeros = torch.zeros(batch.num_tokens)
        batch = batch.with_tokens(old_logprobs=zeros, reference_logprobs=zeros, generation_logprobs=zeros)
        batch, _ = transformed(batch, samples, trainer.transforms)
        return batch["advantages"][batch.mask], batch.loss_weights[batch.mask]

    judged = Samples([sample for sample in mixed() if sample.score.valid])
    for among, alone in zip(credit(mixed()), credit(judged), strict=True):
        torch.testing.assert_close(among, alone)
        assert len(alone) == 10


def test_failures_are_in_no_column_of_gdpo() -> None:
    trainer = load_config({"algorithm": "gdpo", "model": "m"}).build()
    columns = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}, {"right": 1.0, "form": 1.0}]
    judged = [ended(sum(each.values()), components=each) for each in columns]
    failed = ended(0.0, "infrastructure", valid=False)
    alone, among = (
        over_valid(Samples(each), trainer.compute_advantages) for each in (judged, [judged[0], failed, *judged[1:]])
    )
    assert among == [alone[0], 0.0, *alone[1:]]


def test_a_group_with_too_few_verdicts_trains_nothing() -> None:
    first, second = [ended(1.0), ended(0.0, "infrastructure", valid=False)], [ended(1.0, group=1), ended(0.0, group=1)]
    samples = Samples([*first, *second])
    settings = {"algorithm": "reinforce_plus_plus", "model": "m", "rollouts": {"min_group": 2}}
    trainer = load_config(settings).build()
    assert trainer.dropped(samples) == [True, True, False, False]
    found = over_valid(samples, trainer.compute_advantages, min_group=2)
    assert found == [0.0, 0.0, 1.0, 0.0], "rewards, which are whitened by token later"


def test_the_gradient_s_share_of_each_outcome() -> None:
    late = ended(0.0, "policy_timeout")
    found = outcome_metrics([ended(1.0), late, late, ended(0.0, "infrastructure", valid=False)], [1.0, -0.5, -0.5, 0.0])
    numbers = {name: metric.value for name, metric in found.items()}
    assert numbers == {
        "outcome/scored": 0.25, "outcome/policy_timeout": 0.5, "outcome/infrastructure": 0.25,
        "outcome_gradient/scored": 0.5, "outcome_gradient/policy_timeout": 0.5, "outcome_gradient/infrastructure": 0.0,
    }  # fmt: skip


def test_means_of_a_rollout_are_those_of_verdicts() -> None:
    found = rollout_metrics(mixed())
    assert found["reward"].value == pytest.approx(0.5)  # (1 + 0 + 0.5 + 0 + 1) / 5
    assert (found["num_samples"].value, found["num_valid_samples"].value) == (7, 5)


def test_validation_leaves_failures_out_counts_them_and_is_less_sure() -> None:
    groups = [[ended(float(n % 2), group=n, correct=bool(n % 2))] for n in range(8)]
    whole, failed = (
        groups,
        [*groups[:4], *([replace(one, score=replace(one.score, valid=False))] for (one,) in groups[4:])],
    )
    assert measure(whole)["accuracy"] == measure(failed)["accuracy"] == 0.5
    assert "failed_frac" not in measure(whole)
    assert measure(failed)["failed_frac"] == 0.5
    # sqrt(4 * 0.25 / 3) / sqrt(4) beside sqrt(8 * 0.25 / 7) / sqrt(8)
    assert errors_over_prompts(failed)["accuracy"] == pytest.approx(0.288675, abs=1e-6)
    assert errors_over_prompts(whole)["accuracy"] == pytest.approx(0.188982, abs=1e-6)
    assert measure(failed[4:]) == {"failed_frac": 1.0}


# Refills


class Echo:
    """A generation backend that answers ``2``, and knows the seeds that it was asked with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.answer = tuple(tokenizer.encode("2")) + tuple(tokenizer.stop_token_ids)[:1]
        self.seeds: Counter[int] = Counter()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        self.seeds.update(seed for request in requests for seed in request.seeds)
        one = Completion(self.answer, (-1.0,) * len(self.answer), "stop")
        return [[one for _ in request.seeds] for request in requests]

    def update_weights(self, handle: WeightHandle, version: int) -> None: ...

    def shutdown(self) -> None: ...


class Flaky:
    """Fails the first calls."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __call__(self, prompt: str, response: str) -> float:
        self.left -= 1
        if self.left >= 0:
            raise ConnectionError("node3 refused")
        return 1.0


def collected(tiny_model: Path, failures: int, **fates: Any) -> tuple[Samples, Echo]:
    tokenizer = Tokenizer.load(str(tiny_model))
    backend = Echo(tokenizer)
    pool = EnvironmentPool(RewardFunction(Flaky(failures)), concurrency=1, on_outcome=OutcomeTable(**fates))
    policy = GenerationPolicy(LocalWorkerGroup(lambda _: backend, WorkerContext(), "echo"))
    engine = RolloutEngine(policy, pool, tokenizer, max_sequence_tokens=32)
    prompts = [Prompt(index, "1+1=", tuple(tokenizer.encode("1+1="))) for index in range(2)]
    return engine.collect(prompts, RolloutPlan(3, SamplingParams(max_new_tokens=4)), seed=1), backend


@pytest.mark.parametrize(
    ("failures", "fates", "verdicts", "asked"),
    [
        (4, {}, 2, 6),  # dropped: two of six are left
        (4, {"infrastructure": "refill"}, 6, 10),  # four more, which succeed
        (8, {"infrastructure": "refill"}, 6, 14),  # six fail, two of the six new ones, which come a third time
        (8, {"infrastructure": "refill", "max_refills": 1}, 4, 12),
    ],
)
def test_failed_episodes_are_asked_for_again_within_a_budget(
    tiny_model: Path, failures: int, fates: dict[str, Any], verdicts: int, asked: int
) -> None:
    samples, backend = collected(tiny_model, failures, **fates)
    assert [sample.prompt.index for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert sum(sample.score.valid for sample in samples) == verdicts
    assert backend.seeds.total() == asked
    assert set(backend.seeds.values()) == {1}, "no sample is asked for twice with one seed"
    lost = {sample.score.cause for sample in samples if not sample.score.valid}
    assert lost <= {"step: ConnectionError: node3 refused"}


def test_every_outcome_has_a_fate() -> None:
    table = OutcomeTable()
    assert {outcome: table.fate(outcome) for outcome in OUTCOMES} == {
        "scored": "partial", "truncated": "partial", "policy_timeout": "lowest", "environment_timeout": "drop",
        "infrastructure": "drop", "refused": "lowest", "cancelled": "drop",
    }  # fmt: skip


# Weights

AGENT = {"name": "agent", "command": [sys.executable], "reward": "math"}


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        # An episode of 2 tokens, and one that forks into sequences of 2, 2 and 4.
        ({"environment": AGENT}, [0.5, 0.5]),
        ({"environment": AGENT, "loss_aggregation": "token"}, [0.2, 0.8]),
        ({"environment": "math"}, [0.2, 0.8]),
        ({"environment": "math", "loss_aggregation": "sequence"}, [0.5, 0.5]),
    ],
    ids=["agent", "agent by token", "math", "math by sequence"],
)
def test_an_agent_that_forks_buys_no_gradient(settings: dict[str, Any], shares: list[float]) -> None:
    trainer = load_config({"algorithm": "grpo", "model": "m", **settings}).build()
    branches = tuple(
        Branch((1, *range(2, 2 + n)), (False, *[True] * n), (0.0, *[-1.0] * n))  # n sampled tokens
        for n in (2, 4)
    )
    samples = Samples([ended(1.0), replace(ended(0.0), branches=branches)])
    batch = trainer.to_batch(samples, [1.0, -1.0])
    weights = torch.zeros(2).index_add_(0, batch.episodes[batch.sequence_ids], batch.loss_weights)
    assert weights.tolist() == pytest.approx(shares)
