"""verifiers_env: what an episode of verifiers comes to, and an interpreter that lacks verifiers.

tests/integration/interop_envs plays real ones.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import UsageError
from nemorl_agents.interop import verifiers_env
from nemorl_agents.interop.episodes_config import VerifiersEnvConfig, VerifiersEnvTasksConfig
from nemorl_agents.interop.verifiers_env import env_config, played
from nemorl_rl.agents.seats import SeatScores
from pydantic import ValidationError
from recorded_messages import Raises

NAN = float("nan")


def trace(agent: str = "agent", **facts: Any) -> dict[str, Any]:
    """A seat's record, as the worker tells it: rewards are (raw, weighted)."""
    return {
        "agent": agent, "trainable": True, "is_policy": True, "rewards": {"right": [1.0, 1.0]}, "metrics": {},
        "is_timeout": False, "stopped_by": "agent_completed", "errors": [], "turns": 1, **facts,
    }  # fmt: skip


def told(*traces: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {"ok": True, "is_timeout": False, "errors": [], "traces": [*traces], **facts}


def test_weighted_rewards_add_up_and_raw_ones_are_the_components() -> None:
    rewards = {"right": [1.0, 2.0], "short": [0.5, 0.125]}
    found = played(told(trace(rewards=rewards, metrics={"words": 3.0}, turns=4)), "toy")
    assert found.score is not None
    assert (found.score.reward, dict(found.score.components)) == (2.125, {"right": 1.0, "short": 0.5})
    assert (dict(found.score.metrics), dict(found.metrics)) == ({"words": 3.0}, {"turns": 4.0})


def test_the_reward_is_the_mean_over_the_seats_that_the_policy_plays() -> None:
    solvers = [trace(f"solver{n}", rewards={"right": [n, n]}) for n in (0.0, 1.0, 0.5)]
    judge = trace("judge", is_policy=False, trainable=False, rewards={"right": [9.0, 9.0]})
    found = played(told(*solvers, judge), "toy")
    assert found.score is not None
    assert found.score.reward == 0.5  # (0 + 1 + 0.5) / 3


def test_each_seat_of_the_policy_has_its_own_score() -> None:
    found = played(
        told(
            trace("white", seat="white/1", rewards={"won": [1.0, 2.0]}, metrics={"moves": 3.0}),
            trace("black", seat="black/1", rewards={"won": [-1.0, -2.0]}),
            trace("black", seat="black/2", rewards={}),
            trace("referee", seat="referee/1", is_policy=False, rewards={"won": [9.0, 9.0]}),
        ),
        "toy",
    )
    assert isinstance(found.score, SeatScores)
    assert (found.score.reward, found.score.metrics["reward_of_black"]) == (0.0, -2.0)
    assert {seat: score.reward for seat, score in found.score.seats.items()} == {"white/1": 2.0, "black/1": -2.0}
    assert dict(found.score.seats["white/1"].components) == {"won": 1.0}
    assert dict(found.score.seats["white/1"].metrics) == {"moves": 3.0}


def test_a_seat_that_is_not_to_be_trained_needs_a_model_of_its_own_or_a_word_in_the_config(raises: Raises) -> None:
    episode = told(
        trace(seat="agent/1"), trace("user", seat="user/1", trainable=False, rewards={"kept_up": [-1.0, -1.0]}, turns=9)
    )
    with raises(UsageError, "user", "toy"):
        played(episode, "toy")
    found = played(episode, "toy", {"user"})
    assert isinstance(found.score, SeatScores)
    assert (found.score.reward, list(found.score.seats)) == (1.0, ["agent/1"])
    assert dict(found.metrics) == {"turns": 1.0}, "what the user did is not the agent's"


def test_a_role_that_verifiers_trains_can_be_left_out() -> None:
    game = told(trace("white", rewards={"won": [1.0, 1.0]}), trace("black", rewards={"won": [-1.0, -1.0]}))
    found = played(game, "toy", {"black"})
    assert found.score is not None
    assert found.score.reward == 1.0


def test_a_seat_that_no_engine_can_play_is_refused(raises: Raises) -> None:
    with raises(ValidationError):
        VerifiersEnvConfig(taskset="toy", seats={"user": "frozen"})
    assert VerifiersEnvConfig(taskset="toy", seats={"user": "untrained"}).seats == {"user": "untrained"}


def test_tasks_without_a_prompt_are_rows_of_which_the_environment_speaks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def ask_now(self, verb: str, **given: Any) -> Any:
            return [{"prompt": [], "task": {"seed": 3}}]

        def close(self) -> None: ...

    monkeypatch.setattr(verifiers_env, "loaded", lambda config: Worker())
    assert verifiers_env.rows(VerifiersEnvTasksConfig(taskset="toy"))["train"] == [
        {"prompt": [], "verifiers_task": {"seed": 3}}
    ]


@pytest.mark.parametrize(
    ("episode", "problem"),
    [
        (told(trace(rewards={})), "verifiers gave no reward"),
        (told(trace(rewards={"right": None})), "verifiers gave no reward"),
        (told(trace(rewards={"right": [NAN, NAN]})), "the reward of verifiers is nan, and no finite number"),
        (told(trace(errors=["TaskError: boom"]), ok=False), "TaskError: boom"),
        (told(ok=False, errors=["EnvError: no agent"]), "EnvError: no agent"),
    ],
)
def test_an_episode_without_a_reward_says_why(episode: dict[str, Any], problem: str) -> None:
    found = played(episode, "toy")
    assert (found.score, found.problem) == (None, problem)


def test_a_deadline_of_verifiers_is_a_timeout_whatever_it_scored() -> None:
    found = played(told(trace(is_timeout=True)), "toy")
    assert found.is_timeout
    assert found.score is not None
    assert found.score.reward == 1.0


def test_the_taskset_and_its_options_are_verifiers_own_block() -> None:
    env = {"id": "best-of-n", "agent": {"max_turns": 3}}
    config = VerifiersEnvConfig(taskset="toy", options={"count": 2}, env=env)
    assert env_config(config) == {**env, "taskset": {"id": "toy", "count": 2}}


def test_contradictions_are_told(tmp_path: Path, raises: Raises) -> None:
    with pytest.raises(ValidationError, match=r"env\.taskset"):
        VerifiersEnvConfig(taskset="toy", env={"taskset": {"id": "other"}})
    with pytest.raises(ValidationError, match=r"options\.id"):
        VerifiersEnvConfig(taskset="toy", options={"id": "other"})
    with raises(ValidationError):
        VerifiersEnvConfig(taskset="toy", python=tmp_path / "python")


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed here")
def test_an_interpreter_without_verifiers_is_told(raises: Raises) -> None:
    with raises(UsageError, "verifiers"):
        VerifiersEnvTasksConfig(taskset="toy").build("train")
