"""``runs import-checkpoint`` of checkpoints that megatron-core wrote: the model that they came from, to the bit."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from megatron_saves import PROBE, Case, write
from nemorl.errors import CheckpointError, UsageError
from nemorl.resources.worker import WorkerContext
from nemorl_compat.checkpoints import import_checkpoint
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_testing.batches import ragged_batch
from nemorl_testing.models import load_reference, plain_logprobs
from recorded_messages import Raises
from routed_mixtures import MEGATRON_MIXTURES, mixture
from safetensors.torch import load_file
from spawned import run_calls
from spread_cases import run_spread
from tiers import in_full
from torch import Tensor
from transformers import AutoTokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore:.*in a single process.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:megatron.core"),
]

DENSE: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "llama": {"tie_word_embeddings": False},
}
SINGLE = {"singleton_local_shards": True}
NUMBERED = {"non_homogeneous_layers": True}
CASES = (
    Case("qwen3_moe", "qwen3_moe", engine=True),
    Case("qwen3_moe, layers numbered", "qwen3_moe", metadata=NUMBERED),
    Case("qwen3_moe, ep2", "qwen3_moe", 2, {"expert": 2}, engine=True),
    Case("qwen3_moe, tp2, experts numbered", "qwen3_moe", 2, {"tensor": 2}, SINGLE),
    Case("qwen3_moe, pp2", "qwen3_moe", 2, {"pipeline": 2}, engine=True),
    Case("glm4_moe", "glm4_moe", engine=True, uniform=False),
    Case("glm4_moe, ep2", "glm4_moe", 2, {"expert": 2}, engine=True, uniform=False),
    Case("qwen2, tp2", "qwen2", 2, {"tensor": 2}, engine=True),
    Case("qwen3", "qwen3", engine=True),
    Case("llama", "llama"),
    *in_full(
        [
            Case("qwen3_moe, experts numbered", "qwen3_moe", metadata=SINGLE, engine=True),
            Case("qwen3_moe, tp2 ep2", "qwen3_moe", 2, {"tensor": 2, "expert": 2}, engine=True),
            Case("mixtral", "mixtral", engine=True),
            Case("mixtral, ep2, experts numbered", "mixtral", 2, {"expert": 2}, SINGLE),
            Case("qwen2", "qwen2", engine=True),
            Case("qwen3, pp2", "qwen3", 2, {"pipeline": 2}, engine=True),
            Case("llama, tp2", "llama", 2, {"tensor": 2}, SINGLE),
        ]
    ),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {name: mixture(folder / name, name) for name in MEGATRON_MIXTURES}
    for name, sizes in DENSE.items():
        given = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
        found[name] = write_tiny_model(folder / name, architecture=name, **{**given, **sizes})
        torch.manual_seed(7)
        model = load_random(found[name])
        model.save_pretrained(found[name])
    return found


def load_random(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def saved(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor | None]]:
    """``step_5`` of each case, and what megatron-core computes with the model."""
    folder = tmp_path_factory.mktemp("saved")
    steps = {case.name: folder / str(number) / "step_5" for number, case in enumerate(CASES)}
    placed = {
        case.name: replace(
            case,
            model=str(models[case.model]),
            folder=str(steps[case.name] / "policy" / "weights" / "iter_0000000"),
        )
        for case in CASES
    }
    # Those of one rank make a process group as well, and other tests may have left one in this process.
    alone = [case for case in placed.values() if case.world_size == 1]
    computed = run_spread(write, {name: case for name, case in placed.items() if case.world_size > 1})
    computed |= dict(
        zip((case.name for case in alone), run_calls([(write, (case,)) for case in alone], 1), strict=True)
    )
    for name, case in placed.items():
        settings = {"policy": {"model_name": case.model}}
        (steps[name] / "config.yaml").write_text(yaml.safe_dump(settings))
        AutoTokenizer.from_pretrained(case.model).save_pretrained(steps[name] / "policy" / "tokenizer")
    return {name: (steps[name], computed[name][0]) for name in placed}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_checkpoint_becomes_the_model_that_it_came_from(
    case: Case, models: dict[str, Path], saved: dict[str, tuple[Path, Tensor | None]], tmp_path: Path
) -> None:
    step, computed = saved[case.name]
    assert import_checkpoint(step, tmp_path / "out") == str(models[case.model])
    stored, found = (load_file(folder / "model.safetensors") for folder in (models[case.model], tmp_path / "out"))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    batch = ragged_batch()
    with torch.no_grad():
        one, other = (
            plain_logprobs(load_reference(folder), batch) for folder in (models[case.model], tmp_path / "out")
        )
        assert torch.equal(one, other)
        if computed is not None:
            # megatron-core computes the same with what was saved: the writer of this test put it there rightly.
            wanted = load_reference(models[case.model])(input_ids=torch.tensor(PROBE), use_cache=False).logits
            torch.testing.assert_close(computed.float(), wanted.float(), atol=2e-4, rtol=1e-4)


def test_a_run_trains_from_it(saved: dict[str, tuple[Path, Tensor | None]], tmp_path: Path) -> None:
    from nemorl.config import PolicyConfig

    import_checkpoint(saved["qwen3_moe, ep2"][0] / "policy" / "weights", tmp_path / "out", model=None)
    config = PolicyConfig.model_validate({"model_name": str(tmp_path / "out"), "backend": {"name": "megatron"}})
    backend = config.backend.build(config, WorkerContext(), reference=False)
    batch = ragged_batch()
    with torch.no_grad():
        wanted = plain_logprobs(load_reference(tmp_path / "out"), batch)
    torch.testing.assert_close(backend.get_logprobs(batch), wanted, atol=2e-5, rtol=0)
    backend.shutdown()


def test_another_model_another_format_and_another_architecture_are_refused_by_name(
    models: dict[str, Path], saved: dict[str, tuple[Path, Tensor | None]], tmp_path: Path, raises: Raises
) -> None:
    step, _ = saved["qwen3_moe, layers numbered"]
    with raises(CheckpointError, "mlp.experts.gate_up_proj"):
        import_checkpoint(step, tmp_path / "out", model=str(models["mixtral"]))
    with raises(CheckpointError, "model.layers.0.mlp.gate_proj.weight"):
        import_checkpoint(step, tmp_path / "out", model=str(models["qwen3"]))
    with raises(CheckpointError, "decoder.layers.self_attention.q_layernorm.weight"):
        import_checkpoint(saved["qwen3"][0], tmp_path / "out", model=str(models["llama"]))
    gemma = write_tiny_model(tmp_path / "gemma", architecture="gemma2")
    with raises(UsageError, "gemma2"):
        import_checkpoint(step, tmp_path / "out", model=str(gemma))
    other = tmp_path / "other" / "policy" / "weights" / "iter_0000003"
    other.mkdir(parents=True)
    (other / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with raises(UsageError, "zarr"):
        import_checkpoint(tmp_path / "other", tmp_path / "out", model=str(models["qwen3"]))
    assert not (tmp_path / "out").exists()


def test_an_index_with_classes_of_an_older_megatron_core_is_read(
    models: dict[str, Path], saved: dict[str, tuple[Path, Tensor | None]], tmp_path: Path
) -> None:
    step = shutil.copytree(saved["qwen3"][0], tmp_path / "step_5")
    index = step / "policy" / "weights" / "iter_0000000" / ".metadata"
    text = pickle.dumps(pickle.loads(index.read_bytes()), protocol=2)
    ours, theirs = b"megatron.core.dist_checkpointing.strategies.torch\nMCore", b"torch.distributed.checkpoint."
    for kind, module in ((b"Metadata", b"metadata"), (b"SavePlan", b"planner")):
        assert theirs + module + b"\n" + kind + b"\n" in text
        text = text.replace(theirs + module + b"\n" + kind + b"\n", ours + kind + b"\n")
    index.write_bytes(text)
    import_checkpoint(step, tmp_path / "out")
    stored, found = (load_file(folder / "model.safetensors") for folder in (models["qwen3"], tmp_path / "out"))
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
