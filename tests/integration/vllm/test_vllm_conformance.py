"""The backend against every clause of its contract, alone and with the PyTorch trainer."""

from __future__ import annotations

import pytest
from nemorl_testing import conformance

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

test_vllm = conformance(
    "generation_backends",
    {"name": "vllm", "kv_cache_gib": 0.1},
    stays_asleep=["weights"],  # what oneDNN has packed
    skip={"weights_in_process_are_shared": "vLLM holds weights fused and packed for its kernels: a copy by nature"},
)
