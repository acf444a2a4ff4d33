"""An engine over the trainer's own weights: nothing is sampled from them while they are written."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from nemorl.errors import BackendError, DeadlineError
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_grpo import GRPOConfig
from nemorl_rl.placement.engines import RolloutResources
from nemorl_rl.placement.tenants import ROLLOUT
from nemorl_testing.models import tiny_model
from recorded_messages import Raises

LONG = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=1800, ignore_eos=True), (1,))
SHORT = GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=2), (1,))
WAIT_S = 120.0


def resources_of(folder: Path, limit_s: float) -> RolloutResources:
    config = GRPOConfig(
        model=str(tiny_model()),
        generation={"max_new_tokens": 8},
        policy={"max_sequence_tokens": 2048},
        cluster={"worker_timeout_s": limit_s},
    )
    assert config.place().shares_weights
    assert not config.place().takes_turns
    return RolloutResources(config, folder)


@pytest.fixture
def resources(tmp_path: Path) -> Iterator[RolloutResources]:
    found = resources_of(tmp_path, WAIT_S)
    found.training_policy(planned_updates=1)
    yield found
    found.close()


@pytest.mark.parametrize("work", ["train", "save"])
@pytest.mark.slow
def test_what_writes_the_weights_waits_for_requests_that_run(resources: RolloutResources, work: str) -> None:
    policy = resources.generation_policy()
    future = policy.submit(LONG, owner="episode 0")
    policy.submit(SHORT, owner="episode 1").result(WAIT_S)  # so the long one is at work, too
    with resources.turn_of("policy")(work):  # type: ignore[arg-type]
        assert future.done()
    policy.shutdown()


def test_a_request_waits_for_what_writes_the_weights(resources: RolloutResources) -> None:
    policy = resources.generation_policy()
    with resources.turn_of("policy")("save"):  # a checkpoint is loaded
        future = policy.submit(SHORT, owner="episode 0")
        assert wait([future], timeout=0.3).not_done  # two tokens of a tiny model
    assert len(future.result(WAIT_S)) == 1
    policy.shutdown()


def test_log_probs_may_be_measured_while_requests_run(resources: RolloutResources) -> None:
    policy = resources.generation_policy()
    future = policy.submit(LONG, owner="episode 0")
    with resources.turn_of("policy")("measure"):
        future.cancel()
    policy.shutdown()


def test_who_waits_too_long_is_told_for_what(tmp_path: Path, raises: Raises) -> None:
    resources = resources_of(tmp_path, 0.05)
    with resources._during(ROLLOUT), raises(DeadlineError, "rollout"), resources.turn_of("policy")("train"):
        pass
    resources.close()


def test_between_a_step_and_its_publication_a_request_waits(resources: RolloutResources) -> None:
    """Its tokens would be the new weights' under the version of the old ones."""
    policy = resources.generation_policy()
    with resources.turn_of("policy")("train"):
        pass  # a step
    future = policy.submit(SHORT, owner="episode 0")
    assert wait([future], timeout=0.3).not_done  # two tokens of a tiny model
    policy.update_weights(resources.weight_handle(version=1))
    [completion] = future.result(WAIT_S)
    assert completion.weight_versions == (1,)
    policy.shutdown()


def test_who_samples_before_it_publishes_is_told_at_once(resources: RolloutResources, raises: Raises) -> None:
    policy = resources.generation_policy()
    with resources.turn_of("policy")("train"):
        pass
    with raises(BackendError, "sync_weights"):
        policy.generate([SHORT])
    policy.update_weights(resources.weight_handle(version=1))
    assert policy.generate([SHORT])
    policy.shutdown()


def test_a_publication_that_never_comes_is_named(tmp_path: Path, raises: Raises) -> None:
    resources = resources_of(tmp_path, 0.05)
    resources.training_policy(planned_updates=1)
    policy = resources.generation_policy()
    with resources.turn_of("policy")("train"):
        pass
    with raises(DeadlineError, "sync_weights"):
        policy.submit(SHORT, owner="episode 0", deadline_s=WAIT_S).result(WAIT_S)
    policy.shutdown()
    resources.close()
