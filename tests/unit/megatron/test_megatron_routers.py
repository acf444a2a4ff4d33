"""Routers of a mixture score tokens in the precision that they are told; what they cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor.model import load_model
from nemorl_megatron.settings import settings_of
from nemorl_megatron.training import MegatronBackend
from nemorl_rl.models.tiny import write_tiny_model
from recorded_messages import Raises
from transformers import Glm4MoeConfig

pytestmark = pytest.mark.megatron

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
DTYPES = {"model": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@pytest.mark.parametrize("precision", DTYPES)
def test_routers_score_in_the_precision_that_is_said(precision: Any, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, architecture="qwen3_moe", hidden_size=32, intermediate_size=64, **MIXTURE)
    load_model(PolicyConfig(model_name=str(tmp_path), init="random"), seed=7).save_pretrained(tmp_path)
    options = {"name": "megatron", "router": {"dtype": precision}}
    config = PolicyConfig.model_validate({"model_name": str(tmp_path), "precision": "bfloat16", "backend": options})
    made = config.backend.build(config, WorkerContext(seed=3), reference=False, head="language_model")
    assert isinstance(made, MegatronBackend)
    router = next(part for name, part in made._pieces[0].named_modules() if name.endswith("mlp.router"))
    tokens = torch.randn(6, 1, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    with torch.no_grad():
        scores = router.gating(tokens)
    # The product in float64, rounded once; bfloat16 keeps 8 bits of it.
    exact = tokens.double() @ router.weight.double().T
    made.shutdown()
    assert scores.dtype == DTYPES[precision]
    tolerance = {"model": 1e-2, "float32": 1e-6, "float64": 1e-12}[precision]
    assert torch.allclose(scores.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("architecture", "sizes", "router"),
    [
        ("qwen2", {}, {"balance_loss": 0.1}),
        ("qwen2", {}, {"replay": True}),
        ("qwen3_moe", MIXTURE, {"bias_update_rate": 0.1}),
    ],
)
def test_what_a_model_turns_out_not_to_have_is_refused_at_the_start(
    architecture: str, sizes: dict[str, Any], router: dict[str, float], raises: Raises, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, architecture=architecture, hidden_size=32, intermediate_size=64, **sizes)
    options = {"name": "megatron", "router": router}
    config = PolicyConfig.model_validate({"model_name": str(tmp_path), "init": "random", "backend": options})
    with raises(BackendError, *router):
        config.backend.build(config, WorkerContext(seed=3), reference=False, head="language_model")


@pytest.mark.parametrize("change", [{"norm_topk_prob": False}, {"n_group": 2, "topk_group": 1}])
def test_routers_that_would_choose_otherwise_are_refused(change: dict[str, Any], raises: Raises) -> None:
    name = next(iter(change))
    words = {"norm_topk_prob": "norm_topk_prob", "n_group": "2"}
    with raises(BackendError, words[name]):
        settings_of(Glm4MoeConfig(**change))
