"""Values of NeMo RL's keys that were dropped once, although the key has a place."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl_compat.migration import Migration, migrate
from whole_configs import put, whole


def migrated(base: str, changes: dict[str, Any]) -> Migration:
    config = whole(base)
    for path, value in changes.items():
        put(config, path, value)
    return migrate(config)


@pytest.mark.parametrize(
    ("base", "metric", "higher", "expected"),
    [
        ("sft", "val:val_loss", False, None),
        ("sft", "val:val_loss", True, ("validation/val_loss", None)),  # true is what a metric that is named has
        ("grpo", "val:accuracy", True, None),
        ("grpo", "val:accuracy", False, ("validation/accuracy", False)),
    ],
)
def test_the_familys_own_metric_keeps_its_direction(base: str, metric: str, higher: bool, expected: Any) -> None:
    said = {"checkpointing.metric_name": metric, "checkpointing.higher_is_better": higher}
    made = migrated(base, said).config["checkpoint"]
    found = (made["metric"], made.get("higher_is_better")) if "metric" in made else None
    assert found == expected


@pytest.mark.parametrize("filtered", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 50}])
def test_log_probs_before_temperature_and_filters_are_refused_where_these_do_something(
    filtered: dict[str, Any],
) -> None:
    raw = {"policy.generation.vllm_cfg.logprobs_mode": "raw_logprobs"}
    refused = [
        c.key for c in migrated("grpo", {**raw, **{f"policy.generation.{k}": v for k, v in filtered.items()}}).refused
    ]
    assert "policy.generation.vllm_cfg.logprobs_mode" in refused
    assert "policy.generation.vllm_cfg.logprobs_mode" not in [c.key for c in migrated("grpo", raw).refused]


@pytest.mark.parametrize(("theirs", "ours"), [("fp32", "float32"), ("fp64", "float64")])
def test_routers_keep_their_precision(theirs: str, ours: str) -> None:
    said = {"policy.megatron_cfg.moe_router_dtype": theirs, "policy.model_name": "Qwen/Qwen3-30B-A3B"}
    assert migrated("megatron", said).config["policy"]["backend"]["router"]["dtype"] == ours
