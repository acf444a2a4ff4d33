"""A gateway on a port of its own, and the clients that agents use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from nemorl_agents.gateway.access import Access
from nemorl_agents.gateway.gateway import Gateway, GatewayOptions
from scripted_policy import ScriptedPolicy

Open = Callable[[ScriptedPolicy], Access]


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    options = GatewayOptions(models=("policy",), quiet_s=0.2, max_body_bytes=1_000_000, body_timeout_s=1.0)
    with Gateway(options) as found:
        yield found
