"""The training backend against every clause of its contract, in one process."""

from __future__ import annotations

import pytest
from nemorl_testing import conformance

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

test_megatron = conformance("training_backends", "megatron")
test_megatron_with_a_plain_optimizer = conformance(
    "training_backends",
    {"name": "megatron", "distributed_optimizer": False},
    only=[
        "one_step_equals_transformers_and_adamw",
        "gradient_is_clipped_and_its_norm_reported",
        "continuing_from_a_checkpoint_changes_nothing",
        "gradient_that_is_not_finite_skips_the_update",
    ],
)
test_megatron_recomputed = pytest.mark.full(
    conformance(
        "training_backends",
        "megatron",
        policy={"activation_checkpointing": True},
        only=["one_step_equals_transformers_and_adamw", "on_policy_ratio_is_one"],
    )
)
test_megatron_with_adapters = conformance(
    "training_backends",
    "megatron",
    policy={"lora": {"rank": 4}},
    only=[
        "continuing_from_a_checkpoint_changes_nothing",
        "reference_stays_frozen",
        "export_is_the_model",
        "generator_speaks_for_the_trained_policy",
        "what_leaves_the_device_comes_back_unchanged",
    ],
)
test_megatron_with_adapters_at_length = pytest.mark.full(
    conformance(
        "training_backends",
        "megatron",
        policy={"lora": {"rank": 4}},
        only=["microbatching_changes_nothing", "save_pretrained_loads_with_transformers"],
    )
)
