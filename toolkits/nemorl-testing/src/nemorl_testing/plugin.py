"""pytest plugin of nemorl (loaded by pytest itself, so it must stay free of heavy imports).

The marker ``slow``, which conformance tests carry, and fixtures for tests of plugins. The names of fixtures begin with
``nemorl_``, and nothing is done to tests that use none: the environment's other packages have theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nemorl.plugins import Registry


MARKER = "slow: takes more than a few seconds; left out of the fast tier"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def why_no_gpu() -> str | None:
    """The reason why a test cannot run on a GPU here; ``None`` where it can."""
    from nemorl.config.cluster import count_gpus

    if count_gpus() == 0:
        return "needs a CUDA device: nvidia-smi shows none (or CUDA_VISIBLE_DEVICES hides them)"
    import torch

    return None if torch.cuda.is_available() else f"needs a CUDA build of PyTorch: this is {torch.__version__}"


@pytest.fixture
def nemorl_requires_gpu() -> None:
    """Skips the test where PyTorch has no CUDA device, and says so."""
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def nemorl_tiny_model() -> Path:
    """A Hugging Face folder with a Qwen2 of 100k parameters, its weights and a character tokenizer. Read only."""
    from nemorl_testing.models import tiny_model

    return tiny_model()


@pytest.fixture
def nemorl_registry() -> Iterator[Registry]:
    """A registry of this test alone: ``nemorl_registry.register(kind, name, config_class)`` ends with the test."""
    from nemorl.plugins import Registry, registry

    with use_registry(Registry(registry().index)) as scoped:
        yield scoped


@pytest.fixture(scope="module")
def nemorl_shared() -> Iterator[dict[str, dict[str, Any]]]:
    """Parts that conformance checks of one plugin share, closed at the end of the module."""
    from nemorl_testing.kit import close_shared

    parts: dict[str, dict[str, Any]] = {}
    yield parts
    for shared in parts.values():
        close_shared(shared)


@contextmanager
def use_registry(scoped: Registry) -> Iterator[Registry]:
    """Make ``scoped`` the registry of this process inside the block, in all its threads."""
    from nemorl.plugins.registry import replace_registry

    before = replace_registry(scoped)
    try:
        yield scoped
    finally:
        replace_registry(before)
