"""Classic environments of verifiers: 0.1 plays them, 0.4 says that it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nemorl.errors import UsageError
from nemorl.types import Prompt
from nemorl_agents.interop.episodes_config import VerifiersEnvConfig, VerifiersEnvTasksConfig
from nemorl_agents.interop.verifiers_env import VerifiersEnv
from peer_venvs import peer_python
from recorded_messages import Raises
from scripted_policy import ScriptedPolicy, saying

pytestmark = pytest.mark.full

HERE = Path(__file__).parent


def options(python: str) -> dict[str, Any]:
    variables = {"PYTHONPATH": str(HERE)}
    return {"taskset": "nemorl-toy-classic", "options": {"count": 4}, "python": python, "variables": variables}


def test_a_classic_environment_is_played(tmp_path: Path) -> None:
    given = options(peer_python(tmp_path, "verifiers==0.1.14"))
    rows = VerifiersEnvTasksConfig(**given, num_validation=1).build("train")
    assert rows is not None
    assert [row["prompt"][-1]["content"] for row in rows] == ["Say 1.", "Say 2.", "Say 3."]
    environment = VerifiersEnv(VerifiersEnvConfig(**given, timeout_s=120))

    async def play() -> Any:
        prompts = [Prompt(0, "say", (1,), row=row) for row in rows]
        await environment.try_out(prompts[0], ScriptedPolicy())
        return await asyncio.gather(*(environment.rollout(p, ScriptedPolicy(lambda _: saying("2"))) for p in prompts))

    scores = asyncio.run(play())
    environment.close()
    # `right` weighs 2, `length` nothing
    assert [score.reward for score in scores] == [0.0, 2.0, 0.0]
    assert {name: scores[1].metrics[name] for name in ("right", "length", "turns", "outcome_finished")} == {
        "right": 1.0,
        "length": 1.0,
        "turns": 1.0,
        "outcome_finished": 1.0,
    }


def test_a_newer_verifiers_says_how_to_go_on(tmp_path: Path, raises: Raises) -> None:
    given = options(peer_python(tmp_path, "verifiers==0.4.0", "uv"))
    with raises(UsageError, "0.4.0", "Taskset") as caught:
        VerifiersEnvTasksConfig(**given).build("train")
    assert str(caught.value).count("fix:") == 1
