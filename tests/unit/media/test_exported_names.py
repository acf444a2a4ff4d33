"""Exports of models that see or hear have the names of their published checkpoints, and load in plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from nemorl.config.models import PolicyConfig
from nemorl_dtensor.exported import ExportedWeights
from nemorl_dtensor.model import load_model, sight_of
from nemorl_dtensor.published_names import PublishedNames
from nemorl_testing.seeing import tiny_sight
from safetensors.torch import load_file, save_file
from seen_families import KINDS, seer

PUBLISHED = {
    "qwen2_5_vl": {"visual.blocks.0.attn.qkv.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"},
    "qwen3_vl": {
        "model.visual.deepstack_merger_list.0.norm.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    },
    "qwen2_vl": {"visual.blocks.0.attn.qkv.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"},
    "qwen3_vl_moe": {
        "model.visual.deepstack_merger_list.0.norm.weight",
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
        "lm_head.weight",
    },
    "qwen3_5_moe": {
        "model.visual.merger.linear_fc1.weight",
        "model.language_model.layers.0.mlp.gate.weight",
        "lm_head.weight",
    },
    "qwen3_5": {
        "model.visual.merger.linear_fc1.weight",
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
        "lm_head.weight",
    },
    "idefics3": {
        "model.vision_model.embeddings.patch_embedding.weight",
        "model.connector.modality_projection.proj.weight",
        "model.text_model.layers.0.mlp.up_proj.weight",
    },
    "smolvlm": {
        "model.vision_model.embeddings.patch_embedding.weight",
        "model.connector.modality_projection.proj.weight",
        "model.text_model.layers.0.mlp.up_proj.weight",
    },
    "llava": {
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "multi_modal_projector.linear_1.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
        "language_model.lm_head.weight",
    },
    "gemma3": {
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "multi_modal_projector.mm_input_projection_weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
    },
    "qwen2_5_omni_thinker": {
        "audio_tower.conv1.weight",
        "visual.merger.mlp.0.weight",
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    },
    "qwen2_audio": {
        "audio_tower.conv1.weight",
        "multi_modal_projector.linear.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
        "language_model.lm_head.weight",
    },
}
"""Names in the checkpoints on the hub, of one tensor for each part of the model"""


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_published_names_and_loads_bit_for_bit(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForMultimodalLM

    model = seer(kind).model
    names = PublishedNames(model)
    exported = dict(ExportedWeights(model, names, None, 0).tensors())
    assert PUBLISHED[kind] <= set(exported)
    save_file(
        {name: tensor.contiguous() for name, tensor in exported.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    model.config.save_pretrained(tmp_path)
    loaded, report = AutoModelForMultimodalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    theirs, ours = loaded.state_dict(), model.state_dict()
    assert set(theirs) == set(ours)
    assert all(theirs[name].equal(tensor) for name, tensor in ours.items())
    again = dict(names.in_memory(exported.items()))
    assert all(ours[name].equal(tensor) for name, tensor in again.items())
    assert set(ours) - set(again) <= {"lm_head.weight"}  # another name of the embeddings, where they are tied


def test_of_a_model_that_also_speaks_the_thinker_is_loaded(tmp_path: Path) -> None:
    of = seer("qwen2_5_omni_thinker")
    folder = tiny_sight("qwen2_5_omni_thinker")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    save_file(
        {f"thinker.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    thinker = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": thinker}))
    policy = PolicyConfig(model_name=str(tmp_path), hf_config_overrides={"text_config": {"rms_norm_eps": 1e-5}})
    model = load_model(policy, "cpu")
    assert model.config.model_type == "qwen2_5_omni_thinker"
    assert model.config.text_config.rms_norm_eps == 1e-5
    ours = of.model.state_dict()
    assert all(ours[name].equal(tensor) for name, tensor in model.state_dict().items())
    sight = sight_of(model, policy)
    assert sight is not None
    assert [*sight.family.placeholders] == ["image", "audio"]
