"""Fake servers, and generators that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVLLM, suppressed, weights_of
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext

Serve = Callable[..., FakeVLLM]
Build = Callable[..., Any]


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl_agents.servers.pool.POLL_S", 0.02)


@pytest.fixture
def serve(tiny_model: Path) -> Iterator[Serve]:
    """Starts a fake server; it is killed when the test ends."""
    with ExitStack() as stack:

        def start(port: int = 0, **options: Any) -> FakeVLLM:
            server = FakeVLLM(tiny_model, port, **options)

            def end() -> None:
                with suppressed():
                    server.kill()

            stack.callback(end)
            return server

        yield start


@pytest.fixture
def build(tiny_model: Path, tmp_path: Path) -> Iterator[Build]:
    """Makes a generator with weights of this value and version; it is shut down when the test ends."""
    from nemorl_agents.servers import ServerConfig

    with ExitStack() as stack:

        def make(*servers: FakeVLLM | str, value: float | None = 1.0, policy: Any = None, **options: Any) -> Any:
            urls = tuple(server if isinstance(server, str) else server.url for server in servers)
            backend = ServerConfig(urls=urls, **{"check_weights_gib": 0.0, "timeout_s": 20.0, **options})
            settings = {"model_name": str(tiny_model), "max_sequence_tokens": 64, **(policy or {})}
            weights = None if value is None else weights_of(value, 1)
            generator = backend.build(
                GenerationConfig(backend=backend),
                PolicyConfig.model_validate(settings),
                WorkerContext(scratch=tmp_path / "run" / "scratch"),
                weights,
            )
            stack.callback(generator.shutdown)
            return generator

        yield make
