"""Checkpoints of NeMo RL as models. The folders are written with torch.distributed.checkpoint, by its layout."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from nemorl.config import PolicyConfig
from nemorl.errors import CheckpointError, DataError, UsageError
from nemorl_compat.checkpoints import import_checkpoint
from nemorl_dtensor.model import load_model
from recorded_messages import Raises
from routed_mixtures import mixture
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

pytestmark = pytest.mark.filterwarnings("ignore:.*in a single process.*")


@pytest.fixture
def trained(tiny_model: Path) -> Any:
    """The policy that NeMo RL would have at the time of saving."""
    return load_model(PolicyConfig(model_name=str(tiny_model), init="random"), seed=9)


def write_step(
    folder: Path, model_name: Path, state: dict[str, Any], *, inside: str = "weights", **policy: Any
) -> Path:
    """``step_5`` as its checkpointer lays it out: config, weights, tokenizer."""
    step = folder / "step_5"
    weights = step / "policy" / inside
    weights.mkdir(parents=True)
    dcp.save(state, checkpoint_id=str(weights), no_dist=True)
    (step / "config.yaml").write_text(yaml.safe_dump({"policy": {"model_name": str(model_name), **policy}}))
    AutoTokenizer.from_pretrained(model_name).save_pretrained(step / "policy" / "tokenizer")
    return step


def same_weights(folder: Path, model: Any) -> bool:
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_version_1_becomes_a_model(tiny_model: Path, trained: Any, tmp_path: Path) -> None:
    step = write_step(tmp_path, tiny_model, {"model": trained.state_dict()})
    assert import_checkpoint(step, tmp_path / "out") == str(tiny_model)
    assert same_weights(tmp_path / "out", trained)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("1+1=")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(tiny_model)("1+1=")["input_ids"]


def test_a_checkpoint_of_version_2_has_bare_names_in_a_folder_below(
    tiny_model: Path, trained: Any, tmp_path: Path
) -> None:
    state = {name: tensor for name, tensor in trained.state_dict().items() if name != "lm_head.weight"}  # it is tied
    step = write_step(tmp_path, tiny_model, state, inside="weights/model")
    import_checkpoint(step / "policy" / "weights", tmp_path / "out", model=str(tiny_model))
    assert same_weights(tmp_path / "out", trained)


def test_a_checkpoint_of_safetensors_that_ranks_wrote(tiny_model: Path, trained: Any, tmp_path: Path) -> None:
    step = write_step(tmp_path, tiny_model, {"unused": torch.ones(1)}, inside="other")
    folder = step / "policy" / "weights" / "model"
    folder.mkdir(parents=True)
    state = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True), no_dist=True)
    import_checkpoint(step, tmp_path / "out")
    assert same_weights(tmp_path / "out", trained)


def test_the_models_own_config_is_kept_with_its_overrides(tiny_model: Path, trained: Any, tmp_path: Path) -> None:
    state = {"model": trained.to(torch.bfloat16).state_dict()}
    step = write_step(tmp_path, tiny_model, state, hf_config_overrides={"max_position_embeddings": 77})
    import_checkpoint(step, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.max_position_embeddings == 77
    assert model.dtype == torch.bfloat16


class Payload:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_code_in_a_checkpoint_is_refused_and_not_run(
    tiny_model: Path, trained: Any, tmp_path: Path, raises: Raises
) -> None:
    step = write_step(tmp_path, tiny_model, {"model": trained.state_dict()})
    (step / "policy/weights/.metadata").write_bytes(pickle.dumps(Payload(str(tmp_path / "ran"))))
    with raises(CheckpointError, "posix.mkdir", ".metadata"):
        import_checkpoint(step, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused_with_what_differs(
    tiny_model: Path, trained: Any, tmp_path: Path, raises: Raises
) -> None:
    state = trained.state_dict()
    state.pop("model.norm.weight")
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    step = write_step(tmp_path, tiny_model, {"model": state})
    with raises(CheckpointError, "model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        import_checkpoint(step, tmp_path / "out")


def test_what_is_no_such_checkpoint_is_refused_by_name(
    tiny_model: Path, trained: Any, tmp_path: Path, raises: Raises
) -> None:
    (tmp_path / "megatron/policy/weights/iter_0000000").mkdir(parents=True)
    (tmp_path / "nothing").mkdir()
    trained.save_pretrained(tmp_path / "hf")
    for name in ("megatron", "nothing", "hf", "gone"):
        with raises(UsageError, name):
            import_checkpoint(tmp_path / name, tmp_path / "out")
    (said := tmp_path / "megatron/policy/weights/iter_0000000/metadata.json").write_text("{")
    with raises(CheckpointError, said):
        import_checkpoint(tmp_path / "megatron", tmp_path / "out")
    bare = write_step(tmp_path, tiny_model, {"model": trained.state_dict()})
    (bare / "config.yaml").write_text("policy: {")
    with raises(DataError, bare / "config.yaml"):
        import_checkpoint(bare, tmp_path / "out")
    (bare / "config.yaml").unlink()
    with raises(UsageError, "--model"):
        import_checkpoint(bare, tmp_path / "out")


def test_the_command_says_how_to_go_on(tiny_model: Path, trained: Any, tmp_path: Path) -> None:
    from nemorl_compat.command import import_app as app

    step = write_step(tmp_path, tiny_model, {"model": trained.state_dict()})
    result = CliRunner().invoke(app, [str(step), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "use model:" in " ".join(result.output.split())
    assert same_weights(tmp_path / "out", trained)


def published(folder: Path) -> dict[str, torch.Tensor]:
    """A mixture's tensors by their published names, each expert by itself."""
    state = load_file(mixture(folder, "qwen3_moe") / "model.safetensors")
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in state
    return state


def test_experts_that_were_saved_each_by_itself_are_the_models(tmp_path: Path) -> None:
    state = published(tmp_path / "model")
    step = write_step(tmp_path, tmp_path / "model", state, inside="weights/model")
    import_checkpoint(step, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_an_expert_that_is_missing_too_many_or_of_another_size_is_refused_by_name(
    tmp_path: Path, raises: Raises
) -> None:
    state = published(tmp_path / "model")
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    state.pop(lost)
    state["model.layers.0.mlp.experts.8.down_proj.weight"] = torch.zeros(32, 16)
    state["model.layers.0.mlp.experts.0.gate_proj.weight"] = torch.zeros(16, 31)
    step = write_step(tmp_path, tmp_path / "model", state, inside="weights/model")
    with raises(CheckpointError, lost, "model.layers.0.mlp.experts.8.down_proj.weight", 31, 32):
        import_checkpoint(step, tmp_path / "out")
