"""Requests to a gateway without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from nemorl_agents.gateway.access import AccessControl
from nemorl_agents.gateway.episodes import OpenEpisode
from nemorl_agents.gateway.gateway import GatewayOptions
from nemorl_agents.gateway.server import Server
from scripted_policy import ScriptedPolicy
from starlette.testclient import TestClient

OPTIONS = GatewayOptions(max_body_bytes=100_000, quiet_s=5.0, max_concurrent_calls=2)


class Talk:
    """One episode, and a client that has its key."""

    def __init__(
        self, client: TestClient, doors: AccessControl, policy: ScriptedPolicy, options: GatewayOptions
    ) -> None:
        self.client, self.doors, self.policy = client, doors, policy
        self.episode = OpenEpisode(policy, options)
        self.name, self.key = doors.admit(self.episode)

    def post(
        self, path: str, body: Any = None, *, headers: Mapping[str, Any] | None = None, raw: bytes | None = None
    ) -> Any:
        content = {"content": raw} if raw is not None else {"json": body}
        headers = {"authorization": f"Bearer {self.key}", **(headers or {})}
        return self.client.post(f"/e/{self.name}{path}", headers=headers, **content)

    def get(self, path: str) -> Any:
        return self.client.get(f"/e/{self.name}{path}", headers={"x-api-key": self.key})


Open = Callable[..., Talk]


@pytest.fixture
def open_talk() -> Iterator[Open]:
    clients = []

    def start(policy: ScriptedPolicy | None = None, options: GatewayOptions = OPTIONS) -> Talk:
        doors = AccessControl()
        client = TestClient(Server(doors, options).app).__enter__()
        clients.append(client)
        return Talk(client, doors, policy or ScriptedPolicy(), options)

    yield start
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def talk(open_talk: Open) -> Talk:
    return open_talk()
