"""Tests on the simulated device, which changes PyTorch for good: in processes of their own
(``tests/conformance/test_simulated_device.py`` starts one), and nowhere else."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("SIMULATED_DEVICE") else ["test_*.py"]


@pytest.fixture
def device() -> str:
    from nemorl_testing import simulated_device

    return simulated_device.install()
