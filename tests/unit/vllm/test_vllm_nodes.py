"""Further nodes of an engine that do not answer. Ray's own part is not started."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.errors import DeadlineError
from recorded_messages import Raises

nodes = pytest.importorskip("nemorl_vllm.nodes", reason="nemorl-vllm is not installed")
ray = pytest.importorskip("ray")


def test_nodes_that_are_not_ready_in_time_are_told_of(monkeypatch: pytest.MonkeyPatch, raises: Raises) -> None:
    def get(_asked: Any, timeout: float) -> list[Any]:
        raise ray.exceptions.GetTimeoutError(f"not ready in {timeout}")

    monkeypatch.setattr(ray, "get", get)
    with raises(DeadlineError, 2, 600):
        nodes._answers(["one", "other"], nodes.PREPARING_S)
