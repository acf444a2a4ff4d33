"""The generation backend against every clause of its contract, in one process."""

from __future__ import annotations

import pytest
from nemorl_testing import conformance

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

COPIED = {"weights_in_process_are_shared": "megatron-core fuses queries, keys and values: a copy by nature"}
test_megatron = conformance("generation_backends", "megatron", skip=COPIED)
test_megatron_in_small_batches = pytest.mark.full(
    conformance("generation_backends", {"name": "megatron", "max_batch_rows": 2}, skip=COPIED)
)
