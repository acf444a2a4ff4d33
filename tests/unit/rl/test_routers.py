"""Options of routers, and the metrics of what they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl.metrics import merge
from nemorl.plugins.kinds import TrainingBackendConfig
from nemorl_rl.models.routers import ROUTER_METRICS, RouterConfig, load_metrics, router_problems
from nemorl_rl.models.tiny import write_tiny_model

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "glm4_moe": EXPERTS,
}
BALANCED: dict[str, Any] = {"balance_loss": 0.1}
MOVED: dict[str, Any] = {"bias_update_rate": 0.1}
EXACT: dict[str, Any] = {"dtype": "float32"}


@pytest.mark.parametrize(
    ("architecture", "router", "refused"),
    [
        ("qwen2", {}, []),
        ("qwen2", BALANCED | EXACT, ["balance_loss", "dtype"]),
        ("qwen3_moe", BALANCED | MOVED | EXACT, ["bias_update_rate"]),
        ("glm4_moe", BALANCED | MOVED | EXACT, []),
    ],
)
def test_options_that_mean_nothing_for_a_model_are_refused(
    architecture: str, router: dict[str, Any], refused: list[str], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, architecture=architecture, hidden_size=32, **MODELS[architecture])
    policy = PolicyConfig(model_name=str(tmp_path))
    found = [issue.path for issue in router_problems(policy, RouterConfig(**router))]
    assert found == [f"backend.router.{name}" for name in refused]


def test_a_bias_that_moves_is_no_part_of_adapters() -> None:
    fields = {"backend": {"name": "megatron", "router": MOVED}, "lora": {"rank": 4}}
    policy = PolicyConfig.model_validate({"model_name": "nobody/knows", **fields})
    assert isinstance(policy.backend, TrainingBackendConfig)
    assert [issue.path for issue in policy.backend.rank_problems(policy, 1)] == ["backend.router.bias_update_rate"]


def test_metrics_are_of_the_worst_layer_and_of_all_dead_experts() -> None:
    # 12 tokens each: means of 3 and 4. 6 / 3 = 2 beats 5 / 4. The third layer was not computed.
    found = load_metrics([[6, 3, 3, 0], [5, 4, 3, 4], [0, 0, 0, 0], [12, 0, 0, 0]])
    assert {name: metric.value for name, metric in found.items()} == {"expert_load_max": 4.0, "dead_experts": 4}
    assert {f"train/{name}" for name in found} <= {*ROUTER_METRICS}
    assert load_metrics([[0, 0]]) == {}


def test_ranks_and_minibatches_say_the_most() -> None:
    # Two ranks say the same of an update; the second update of the step is worse.
    first, second = load_metrics([[2, 2]]), load_metrics([[4, 0]])
    together = merge([first, first, second, second])
    assert {name: metric.value for name, metric in together.items()} == {"expert_load_max": 2.0, "dead_experts": 1}
