"""The worker's seats: each trace of an episode calls the policy in the name of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nemorl_agents.gateway.gateway import Gateway
from nemorl_agents.interop import verifiers_env
from nemorl_agents.interop.workers.relay import SESSION_HEADER, Relay, Route
from nemorl_trust.front_door import FrontDoor, Limits
from scripted_policy import ScriptedPolicy

WORKERS = Path(verifiers_env.__file__).parent / "workers"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which lies beside its modules where it runs."""
    monkeypatch.syspath_prepend(str(WORKERS))
    for name in ("verifiers_worker", "relay", "classic_verifiers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import verifiers_worker  # type: ignore[import-not-found]

    return verifiers_worker


def test_seats_of_a_role_are_numbered_in_the_order_in_which_they_are_taken(worker: Any) -> None:
    taken: list[str] = []
    for role in ("solver", "judge", "solver", "solver"):
        taken.append(worker._seat(role, taken))
    assert taken == ["solver/1", "judge/1", "solver/2", "solver/3"]


def test_a_trace_is_told_with_its_seat(worker: Any) -> None:
    client = SimpleNamespace(base_url="http://relay/v1")
    trace = SimpleNamespace(
        id="t1", agent=SimpleNamespace(name="white", trainable=True, config=SimpleNamespace(client=client)),
        rewards={"won": SimpleNamespace(score=1.0, value=2.0)}, metrics={"moves": 3.0}, is_timeout=False,
        stop_condition=None, errors=[], num_turns=3,
    )  # fmt: skip
    episode = SimpleNamespace(ok=True, is_timeout=False, errors=[], traces=[trace])
    told = worker._told(episode, "http://relay/v1", {"t1": "white/1"})
    found = verifiers_env.played(json.loads(json.dumps(told)), "toy")
    assert told["traces"][0]["seat"] == "white/1"
    assert found.score is not None
    assert (found.score.reward, dict(found.score.components)) == (2.0, {"won": 1.0})


def test_the_relay_says_in_whose_name_a_call_is() -> None:
    policy = ScriptedPolicy()

    async def calls() -> None:
        relay = Relay("policy", FrontDoor("the relay", Limits()))
        await relay.start()
        try:
            relay.routes = {name: Route(access.base_url, access.api_key, seat) for name, seat in seats.items()}
            for name in seats:
                body = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
                headers = {SESSION_HEADER: name, "content-type": "application/json"}
                request = urllib.request.Request(
                    f"{relay.base_url}/chat/completions", json.dumps(body).encode(), headers
                )
                await asyncio.to_thread(lambda asked=request: urllib.request.urlopen(asked).read())
        finally:
            await relay.stop()

    seats = {"trace-a": "white/1", "trace-b": "black/1", "trace-c": ""}
    with Gateway() as gateway:
        access = gateway.open(policy)
        asyncio.run(calls())
    assert [asked.options.seat for asked in policy.asked] == ["white/1", "black/1", ""]
