"""NeMo-Gym: episodes on a server that speaks its protocol. The real Gym: test_real_nemo_gym.py."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from gym_stand_in import AGENT, Gym, running
from nemorl.errors import BackendError, DataError, UsageError
from nemorl.media import Media
from nemorl.types import Prompt, Score
from nemorl_agents.interop.episodes_config import NemoGymConfig, NemoGymTasksConfig
from nemorl_agents.interop.gym_servers import _ray_with_gpus
from nemorl_agents.interop.nemo_gym import NemoGym, played
from nemorl_rl.agents.contract import CallLimitError
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.prompts import to_prompt
from nemorl_testing.seeing import drawing
from pictured_talks import policy_config, url_of
from pydantic import ValidationError
from recorded_messages import Raises
from scripted_policy import LIMITS, Asked, ScriptedPolicy, saying

STAND_IN = str(Path(__file__).with_name("gym_stand_in.py"))
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]},
    "agent_ref": {"type": "responses_api_agents", "name": AGENT},
    "wanted": "4",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def gym() -> Iterator[Gym]:
    with running(f"http://127.0.0.1:{free_port()}/v1") as found:
        yield found


@pytest.fixture
def environment(gym: Gym) -> Iterator[Callable[..., NemoGym]]:
    made: list[NemoGym] = []

    def build(**options: Any) -> NemoGym:
        """One at a time: Gym knows a single address of the policy."""
        for before in made:
            before.close()
        port = int(gym.policy_base_url.split(":")[2].removesuffix("/v1"))
        given = {"head_url": f"http://127.0.0.1:{gym.port}", "model_port": port, **options}
        made.append(NemoGym(NemoGymConfig.model_validate(given)))
        return made[-1]

    yield build
    for one in made:
        one.close()


def play(environment: NemoGym, *rows: Any, policy: ScriptedPolicy | None = None) -> list[Score]:
    """One episode per row, all at once."""

    async def all_of_them() -> list[Score]:
        policies = [policy or ScriptedPolicy(repeats) for _ in rows]
        prompts = [Prompt(0, "2+2?", (1,), row={"nemo_gym": {**ROW, **row}}) for row in rows]
        return await asyncio.gather(*map(environment.rollout, prompts, policies))

    return asyncio.run(all_of_them())


def repeats(asked: Asked) -> Any:
    """The text of the first message, which tells whose episode it is, and the number of the call."""
    turns = sum(message["role"] == "assistant" for message in asked.messages)
    return saying(f"{asked.messages[0]['content']} {turns}")


def asks(text: str, wanted: str, **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}, "wanted": wanted, **more}


def outcome(score: Score) -> str:
    [found] = [name for name, value in score.metrics.items() if name.startswith("outcome_") and value]
    return found.removeprefix("outcome_")


def test_episodes_that_run_at_the_same_time_get_their_own_answers(environment: Callable[..., NemoGym]) -> None:
    rows = [asks(f"who {n}", f"who {n} 2" if n % 2 else "another", rounds=3, in_path=n % 3 == 0) for n in range(12)]
    scores = play(environment(), *rows)
    assert [score.reward for score in scores] == [0.0, 1.0] * 6
    assert {outcome(score) for score in scores} == {"finished"}
    assert {score.metrics["gateway_requests"] for score in scores} == {3.0}


def test_the_servers_numbers_are_metrics_and_the_rows_own_are_not(environment: Callable[..., NemoGym]) -> None:
    row = asks("a", "a 0", level=3, verifier={"passed": True, "level": 3, "note": "x", "mean": float("nan")})
    [score] = play(environment(), row)
    # "a 0" has three characters; a bool is 0 or 1, a text and what is not finite is none
    metrics = {name for name in score.metrics if not name.startswith(("outcome_", "gateway_"))}
    found = {name: score.metrics[name] for name in metrics}
    assert found == {"length": 3.0, "passed": 1.0, "environment_error": 0.0}


def test_the_request_is_the_row_and_names_the_episode(environment: Callable[..., NemoGym], gym: Gym) -> None:
    row = asks("a", "a 0", verifier_metadata={"k": [1]})
    row["responses_create_params"]["metadata"] = {"extra_body": "{}"}
    play(environment(), row)
    got = gym.got[-1]
    assert got["verifier_metadata"] == {"k": [1]}
    assert got["responses_create_params"]["metadata"] == {"extra_body": "{}", "nemorl_episode": got["_ng_rollout_id"]}


def test_items_of_a_row_are_sent_as_data_urls(environment: Callable[..., NemoGym], gym: Gym) -> None:
    row = asks("a", "a 0")
    row["verifier_metadata"] = {"seen": Media("image", b"GIF89a")}
    play(environment(), row)
    assert gym.got[-1]["verifier_metadata"] == {"seen": "data:image/gif;base64,R0lGODlh"}
    row["verifier_metadata"] = {"seen": object()}
    with pytest.raises(TypeError, match="object"):
        play(environment(), row)


def test_a_trial_episode_tells_what_the_run_would_stumble_over(
    environment: Callable[..., NemoGym], raises: Raises
) -> None:
    def try_out(row: Any, **options: Any) -> None:
        found = Prompt(0, "2+2?", (1,), row={"nemo_gym": {**ROW, **row}})
        asyncio.run(environment(**options).try_out(found, ScriptedPolicy(repeats)))

    try_out(asks("a", "nothing of use"))  # whatever it earns
    with raises(UsageError, "crashed", "422", varies=r"(?<=127.0.0.1:)\d+"):
        try_out({"answers": "Unprocessable", "status": 422})
    with raises(DataError, "simple_agent", AGENT):
        try_out({}, agent="simple_agent")
    with raises(UsageError, "127.0.0.1:9"):
        try_out({}, head_url="http://127.0.0.1:9")


def test_a_reward_in_parts_keeps_them(environment: Callable[..., NemoGym]) -> None:
    told = {"reward": 1.5, "reward_components": {"format": 0.5, "correct": 1.0}, "response": {}}
    [score] = play(environment(), asks("a", "a 0", verifier=told))
    assert (score.reward, score.components) == (1.5, {"format": 0.5, "correct": 1.0})
    assert "reward_components" not in score.metrics
    for bad in ([1.0], {"format": "good"}):
        found = played(json.dumps({**told, "reward_components": bad}), {})
        assert found.score is None
        assert "reward" in found.problem


@pytest.mark.ray
@pytest.mark.slow
def test_gym_is_told_of_the_runs_ray_where_nodes_with_free_gpus_are_left(raises: Raises) -> None:
    with raises(UsageError, 1, "cluster.address"):
        _ray_with_gpus(1)
    ray.init(num_cpus=1, num_gpus=1, include_dashboard=False)
    try:
        assert _ray_with_gpus(1) == ray.get_runtime_context().gcs_address
        with raises(UsageError, 2, "cluster.address"):
            _ray_with_gpus(2)
    finally:
        ray.shutdown()


def test_a_reward_beyond_all_floats_is_none() -> None:
    found = played(json.dumps({"reward": 10**400, "steps": 10**400}), {})
    assert found.score is None
    assert "no finite number" in found.problem
    assert found.metrics == {}


def test_a_sample_that_gym_masks_trains_nothing(environment: Callable[..., NemoGym]) -> None:
    [score] = play(environment(), asks("a", "a 0", verifier={"mask_sample": True}))
    assert not score.valid


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answers": '{"response": {}}'}, "has no reward; it has response"),
        ({"answers": '{"reward": NaN}'}, "the reward of NeMo-Gym is nan, and no finite number"),
        ({"answers": '{"reward": null}'}, "the reward of NeMo-Gym is None"),
        ({"answers": "[1]"}, "no JSON object"),
        ({"answers": "Unprocessable", "status": 422}, "answers 422: Unprocessable"),
        ({"forgets": True}, "to which episode it belongs"),
    ],
)
def test_an_answer_without_a_reward_is_a_crash(
    environment: Callable[..., NemoGym], row: dict[str, Any], says: str
) -> None:
    [score] = play(environment(), row)
    assert (score.reward, score.valid, outcome(score)) == (0.0, True, "crashed")
    with pytest.raises(UsageError, match=says):
        play(environment(outcomes={"crashed": "error"}), row)


def test_a_limit_of_the_run_stops_an_episode_and_is_told_once(environment: Callable[..., NemoGym]) -> None:
    def refuses(_: Asked) -> Any:
        raise CallLimitError("no more", fix="call less often")

    [score] = play(environment(outcomes={"stopped": -1.0}), {}, policy=ScriptedPolicy(refuses))
    # Gym asks for ever after a 429; the relay makes the one that stays a 400.
    assert (score.reward, outcome(score), score.metrics["gateway_requests"]) == (-1.0, "stopped", 1.0)


def test_the_engines_failure_ends_the_run(environment: Callable[..., NemoGym], raises: Raises) -> None:
    def fails(_: Asked) -> Any:
        raise BackendError("the engine is gone", fix="restart")

    with raises(BackendError):
        play(environment(), {}, policy=ScriptedPolicy(fails))


def test_an_episode_without_end_is_ended_at_its_deadline(environment: Callable[..., NemoGym]) -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    policy = ScriptedPolicy(lambda _: never(), limits=replace(LIMITS, timeout_s=0.5))
    [score] = play(environment(outcomes={"timeout": None}), {}, policy=policy)
    assert (score.valid, outcome(score)) == (False, "timeout")


def test_a_server_that_is_gone_is_a_crash_and_then_ends_the_run(environment: Callable[..., NemoGym]) -> None:
    alone = environment(agents={AGENT: f"http://127.0.0.1:{free_port()}"}, give_up_after=2)
    [score] = play(alone, {})
    assert (outcome(score), score.metrics["environment_error"]) == ("crashed", 1.0)
    with pytest.raises(UsageError, match=r"\b2\b"):
        play(alone, {})


def test_mistakes_are_told_before_the_first_episode(
    environment: Callable[..., NemoGym], gym: Gym, raises: Raises
) -> None:
    with raises(UsageError):
        play(environment(head_url=f"http://127.0.0.1:{free_port()}"), {})
    with raises(UsageError):
        play(environment(head_url=f"http://127.0.0.1:{gym.port}/toy"), {})
    with raises(DataError, "toy_simple_agnt"):
        play(environment(agent="toy_simple_agnt"), {})
    with raises(DataError):
        play(environment(), {"agent_ref": None})
    with pytest.raises(UsageError, match=str(gym.port)):
        play(environment(model_port=gym.port), {})
    with pytest.raises(ValidationError, match="model_port"):
        NemoGymConfig()


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """As a shell's background jobs have it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
def test_gym_is_started_and_ended() -> None:
    start = {"config_paths": ["toy.yaml"], "command": [sys.executable, STAND_IN], "ready_s": 60}
    environment = NemoGym(NemoGymConfig.model_validate({"start": start}))
    [score] = play(environment, asks("a", "a 0"))
    assert score.reward == 1.0
    process = environment._servers._process  # type: ignore[union-attr]
    environment.close()
    environment.close()
    assert process.poll() == 256 - signal.SIGINT, "as by Ctrl-C, and not killed after a long wait"


def test_a_gym_that_dies_ends_the_run() -> None:
    start = {"config_paths": ["toy.yaml"], "command": [sys.executable, STAND_IN], "ready_s": 60}
    environment = NemoGym(NemoGymConfig.model_validate({"start": start}))
    play(environment, asks("a", "a 0"))
    environment._servers._process.stdin.close()  # type: ignore[union-attr]
    environment._servers._process.wait(30)  # type: ignore[union-attr]
    with pytest.raises(BackendError) as caught:
        play(environment, {})
    assert "Waiting for servers" in str(caught.value), "what it wrote last"
    environment.close()


def test_a_gym_that_does_not_start_says_what_it_wrote(raises: Raises) -> None:
    start = {"config_paths": ["toy.yaml"], "command": [sys.executable, STAND_IN], "overrides": ["+broken=true"]}
    environment = NemoGym(NemoGymConfig.model_validate({"start": start}))
    with raises(BackendError, "uv"):
        play(environment, {})
    environment.close()


def test_rows_begin_with_the_requests_messages(tmp_path: Path) -> None:
    other = {**ROW, "agent_ref": {"name": "other"}}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}, {"type": "reasoning"}]
    mixed = {"responses_create_params": {"instructions": "Be brief.", "input": items}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (ROW, other, mixed)) + "\n\n")
    made = NemoGymTasksConfig(path=path).build("train")
    assert made is not None
    assert made[2]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
    ]
    assert made[0]["nemo_gym"] == ROW
    assert len(NemoGymTasksConfig(path=path, agent="other").build("train") or ()) == 1
    assert NemoGymTasksConfig(path=path).build("validation") is None


def test_a_rows_images_are_those_of_its_prompt(tmp_path: Path) -> None:
    shown = {"type": "input_image", "image_url": url_of(drawing(1).data), "detail": "auto"}
    asked = [{"role": "user", "content": [shown, {"type": "input_text", "text": "what?"}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "responses_create_params": {"input": asked}}))
    [row] = NemoGymTasksConfig(path=path).build("train") or ()
    tokenizer = Tokenizer.of(policy_config())
    same = {"prompt": "what?", "image": drawing(1).data}
    assert to_prompt(row, 0, tokenizer).token_ids == to_prompt(same, 0, tokenizer).token_ids


def test_mistakes_in_rows_are_told_with_their_line(tmp_path: Path, raises: Raises) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{{\n")
    with raises(DataError, "rows.jsonl:2"):
        NemoGymTasksConfig(path=path).build("train")
    path.write_text('{"prompt": "2+2"}\n')
    with raises(DataError, "rows.jsonl:1"):
        NemoGymTasksConfig(path=path).build("train")
    path.write_bytes(json.dumps(ROW).encode() + b"\n\xff\n")
    with raises(DataError, "rows.jsonl:2"):
        NemoGymTasksConfig(path=path).build("train")
    path.write_text(json.dumps({"responses_create_params": {"input": None}}))
    with raises(DataError, "rows.jsonl:1"):
        NemoGymTasksConfig(path=path).build("train")
    path.write_text(json.dumps(ROW))
    with raises(DataError, "x"):
        NemoGymTasksConfig(path=path, agent="x").build("train")
