"""What MTP layers are trained with, which tensors of files they are, and what a planner counts for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl.config.load import validate
from nemorl.errors import BackendError, ConfigError
from nemorl_megatron.config import MegatronConfig
from nemorl_megatron.mtp_config import MtpConfig
from nemorl_megatron.training_memory import memory
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.work import MtpWork
from recorded_messages import Raises

SIZES: dict[str, Any] = {
    "model_type": "glm4_moe",
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "moe_intermediate_size": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 50,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}


def run(
    folder: Path, *, mtp: dict[str, Any] | None = None, policy: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A GRPO config over two processes."""
    from nemorl_grpo import GRPOConfig

    backend = {"name": "megatron", "mtp": mtp or {}, **options}
    data = {"model": str(folder), "policy": {"backend": backend, **(policy or {})}, "cluster": {"workers_per_node": 2}}
    return validate(GRPOConfig, data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, "virtual_pipeline_parallel_size"),
        ({"layout": "shared"}, "layout"),
        ({"policy": {"lora": {}}}, "mtp"),
        ({"mtp": {"num_layers": 2}}, "mtp.num_layers"),
    ],
)
def test_what_is_not_proven_with_mtp_is_refused_by_name(
    changes: dict[str, Any], path: str, model: Path, raises: Raises
) -> None:
    assert run(model).policy.backend.mtp == MtpConfig()
    assert run(model, mtp={"num_layers": 2, "use_repeated_layer": True}).policy.backend.mtp.stored_layers == 1
    with raises(ConfigError, "mtp", path=f"policy.backend.{path}"):
        run(model, **changes)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"num_nextn_predict_layers": 0}, "mtp.num_layers"),
        ({"model_type": "qwen3_moe"}, "mtp"),
    ],
)
def test_a_model_without_mtp_layers_is_told_from_its_config(
    change: dict[str, Any], path: str, model: Path, raises: Raises
) -> None:
    (model / "config.json").write_text(json.dumps(SIZES | change))
    with raises(ConfigError, path=f"policy.backend.{path}"):
        run(model)


def test_a_tied_embedding_over_stages_is_refused(model: Path, raises: Raises) -> None:
    (model / "config.json").write_text(json.dumps({**SIZES, "tie_word_embeddings": True}))
    assert run(model)
    with raises(ConfigError, "mtp", path="policy.backend.pipeline_parallel_size"):
        run(model, pipeline_parallel_size=2)


def test_files_hold_an_mtp_layer_after_the_models_own() -> None:
    pytest.importorskip("transformers")
    from nemorl_megatron.bridge.tables import mtp_copies, weights
    from nemorl_megatron.settings import settings_of
    from transformers import AutoConfig

    settings = replace(settings_of(AutoConfig.for_model(**SIZES, use_qk_norm=True)), mtp_layers=1)
    found = {weight.parameter: weight for weight in weights(settings) if weight.parameter.startswith("mtp.")}
    # 4 layers: the MTP layer is number 4, and a mixture of 4 experts as layer 3 is.
    assert {name for weight in found.values() for name in weight.stored} == {
        "model.layers.4." + name
        for name in (
            *("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight"),
            *("post_attention_layernorm.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
            *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            *(f"mlp.shared_experts.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
            *(
                f"mlp.experts.{expert}.{name}.weight"
                for expert in range(4)
                for name in ("gate_proj", "up_proj", "down_proj")
            ),
        )
    }
    assert found["mtp.layers.0.eh_proj.weight"].shapes == ((8, 16),)
    assert mtp_copies(settings, "model.embed_tokens.weight") == ["model.layers.4.embed_tokens.weight"]
    assert mtp_copies(settings, "lm_head.weight") == ["model.layers.4.shared_head.head.weight"]


@pytest.mark.megatron
def test_a_model_that_turns_out_to_have_none_is_refused_at_the_start(tmp_path: Path, raises: Raises) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")
    from nemorl_megatron.bridge import bridge_for

    write_tiny_model(tmp_path, hidden_size=32, intermediate_size=64)
    with raises(BackendError, "MTP"):
        bridge_for(PolicyConfig(model_name=str(tmp_path)), mtp=MtpConfig())


def test_the_parameters_of_an_mtp_layer_by_hand() -> None:
    geometry = Geometry.from_config(SIZES)
    assert geometry.mtp_layers == 1
    # Attention 8 * (8 + 8) * 2, with 2 heads of 4 for queries, keys and values alike.
    attention = 8 * 8 * 4
    # Router 4 * 8, shared expert 3 * 8 * 6; projection 8 * 16; norms: 2 of a layer and the last of the model shared
    # out over 4 layers (72 // 4), and 3 of MTP.
    assert geometry.mtp_common == attention + 4 * 8 + 3 * 8 * 6 + 8 * 16 + 3 * 8 + 72 // 4
    assert geometry.mtp_experts == 4 * 3 * 8 * 6
    assert geometry.mtp_active == attention + 4 * 8 + 3 * 8 * 6 + 2 * 3 * 8 * 6 + 8 * 16
    layer, head = geometry.mtp_flops(10, 4, 55)
    # 2 heads * (4 + 4) * 2 FLOPs a pair
    assert (layer, head) == (2 * geometry.mtp_active * 10 + 32 * 55, 2 * 50 * 8 * 4)
    # A layer thrice, and logits twice and once for the gradient of states.
    assert MtpWork(2).computed_flops(geometry, 10, 4, 55, recomputed=False) == 2 * (3 * layer + 3 * head)
    assert MtpWork(2, is_apart=False).computed_flops(geometry, 10, 4, 55, recomputed=True) == 2 * (4 * layer + 4 * head)
    assert MtpWork(2, trains=False).computed_flops(geometry, 10, 4, 55, recomputed=True) == 2 * (layer + head)


def test_a_planner_counts_mtp_layers_and_what_trains_them() -> None:
    def parts(stages: int = 1, **mtp: Any) -> dict[str, float]:
        backend = MegatronConfig(mtp=MtpConfig(**mtp) if mtp else None, pipeline_parallel_size=stages)
        policy = PolicyConfig(precision="float32", backend=backend)
        held = HeldModel("policy", policy, Geometry.from_config(SIZES), stages, microbatch_tokens=64)
        return {part.name: part.size for part in memory(held, backend).lasting}

    geometry = Geometry.from_config(SIZES)
    extra = geometry.mtp_common + geometry.mtp_experts
    without, trained, measured = parts(), parts(num_layers=1), parts(loss_scaling_factor=0)
    assert "MTP weights" not in without
    assert trained["MTP weights"] == measured["MTP weights"] == 4 * extra
    assert trained["moments"] - without["moments"] == 8 * extra
    assert trained["gradients"] - without["gradients"] == 4 * extra
    assert measured["moments"] == without["moments"]
    assert parts(num_layers=3, use_repeated_layer=True)["MTP weights"] == 4 * extra
    # The last of two stages also holds the embedding, 50 * 8.
    assert parts(2, num_layers=1)["MTP weights"] == 4 * (extra + 400)
